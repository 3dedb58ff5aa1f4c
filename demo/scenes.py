"""Drawn scenes: pictures whose content is known exactly, with a caption and an edge map.

A scene is one or two shapes with a colour, a texture and a size, before a backdrop, under directional light.
Shapes are signed distance fields, so that edges are soft at any size. `Scenes` holds a batch as tensors: a
batch is sampled from one seed, and drawn on whatever device it is moved to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from .canny import canny

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.85, 0.10, 0.10),
    "orange": (0.96, 0.50, 0.06),
    "yellow": (0.96, 0.88, 0.15),
    "green": (0.12, 0.62, 0.18),
    "cyan": (0.15, 0.80, 0.86),
    "blue": (0.10, 0.22, 0.85),
    "purple": (0.48, 0.14, 0.68),
    "pink": (0.96, 0.52, 0.72),
    "white": (0.95, 0.95, 0.95),
    "black": (0.06, 0.06, 0.06),
}
SIZES = ("small", "medium", "large")
TEXTURES = ("plain", "glossy", "striped", "checkered", "dotted", "speckled")
SHAPES = ("circle", "ring", "cross", "square", "triangle", "diamond", "hexagon", "star")
RELATIONS = ("left of", "right of", "above", "below")
PLACES = ("on the left", "on the right", "at the top", "at the bottom", "in the centre")
LIGHTS = ("left", "right", "top", "bottom")
BACKDROPS = ("plain", "gradient", "striped", "checkered", "room")

_RADII = ((0.12, 0.14), (0.155, 0.18), (0.20, 0.225))  # of the picture's shorter side, per size
_DIRECTIONS = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 1.0], [0.0, 0.0]])  # x right, y down
# Corners, inner radius and turn of the shapes drawn as star polygons; a regular polygon is one whose inner
# radius lies on the edge, cos(pi / corners).
_POLYGONS = {
    "square": (4, math.cos(math.pi / 4), math.pi / 4),
    "triangle": (3, math.cos(math.pi / 3), 0.0),
    "diamond": (4, math.cos(math.pi / 4), 0.0),
    "hexagon": (6, math.cos(math.pi / 6), 0.0),
    "star": (5, 0.42, 0.0),
}
_HORIZON = 0.66  # of the picture's height
_MOONLIGHT = (0.20, 0.22, 0.34)  # what is left of a backdrop's colour at night


@dataclass(frozen=True)
class Scenes:
    """A batch of B scenes. Index tensors are int64, the rest float32; lengths are fractions of the picture.

    Attributes:
        pair: [B] bool, whether the second object is there.
        shape, texture, size: [B, 2] indices into SHAPES, TEXTURES, SIZES, for each object.
        colour: [B, 4] indices into COLOURS, all different: object, object, backdrop, the backdrop's second.
        tint: [B, 4, 3] small differences from the named colours.
        relation: [B] of the first object to the second, index into RELATIONS.
        place: [B] of a lone object, index into PLACES.
        centre: [B, 2, 2] (x, y) in [0, 1].
        radius: [B, 2] of the shorter side.
        turn: [B, 2] radians.
        phase: [B, 3, 2] where textures start: object, object, backdrop.
        light: [B] index into LIGHTS.
        backdrop: [B] index into BACKDROPS.
        mention: [B, 4] bool, what the caption tells: sizes, place, backdrop, light.
    """

    pair: Tensor
    shape: Tensor
    texture: Tensor
    size: Tensor
    colour: Tensor
    tint: Tensor
    relation: Tensor
    place: Tensor
    centre: Tensor
    radius: Tensor
    turn: Tensor
    phase: Tensor
    light: Tensor
    backdrop: Tensor
    mention: Tensor

    def __len__(self) -> int:
        return len(self.pair)

    def to(self, device: torch.device | str) -> Scenes:
        """The same scenes on another device."""
        return Scenes(*(getattr(self, field.name).to(device) for field in fields(self)))


class Example(NamedTuple):
    """One scene: picture [3, H, W] float in [0, 1], caption, edges [1, H, W] bool."""

    picture: Tensor
    caption: str
    edges: Tensor


def example(seed: int, height: int = 256, width: int = 256) -> Example:
    """Draw the one scene of a seed."""
    scenes = sample(1, seed)
    picture = draw(scenes, height, width)
    return Example(picture[0], captions(scenes)[0], canny(picture)[0])


def sample(count: int, seed: int) -> Scenes:
    """Choose `count` scenes; equal arguments give equal scenes on every machine."""
    generator = torch.Generator().manual_seed(seed)

    def number(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    def pick(choices: int, *shape: int) -> Tensor:
        return torch.randint(choices, (count, *shape), generator=generator)

    pair = number() < 0.7
    size = pick(len(SIZES), 2)
    radii = torch.tensor(_RADII)[size]
    radius = torch.lerp(radii[..., 0], radii[..., 1], number(2))
    relation, place = pick(len(RELATIONS)), pick(len(PLACES))
    return Scenes(
        pair=pair,
        shape=pick(len(SHAPES), 2),
        texture=pick(len(TEXTURES), 2),
        size=size,
        colour=number(len(COLOURS)).argsort(1)[:, :4],
        tint=(number(4, 3) - 0.5) * 0.08,
        relation=relation,
        place=place,
        centre=_centres(pair, relation, place, radius, number(4)),
        radius=radius,
        turn=(number(2) - 0.5) * 0.35,
        phase=number(3, 2),
        light=pick(len(LIGHTS)),
        backdrop=torch.where(number() < 0.5, 0, pick(len(BACKDROPS))),
        mention=number(4) < torch.tensor([0.7, 0.8, 0.9, 0.6]),
    )


def _centres(pair: Tensor, relation: Tensor, place: Tensor, radius: Tensor, chance: Tensor) -> Tensor:
    """Where objects stand, [B, 2, 2]: a pair apart along its relation, a lone one at its place."""
    axis = _DIRECTIONS[relation]
    across = axis.flip(1).abs()
    nearest = radius.sum(1) + 0.03
    apart = torch.maximum(nearest, 0.36 + 0.14 * chance[:, 0])
    lean = (chance[:, 1] - 0.5) * 0.25
    middle = 0.5 + (chance[:, 2:] - 0.5) * 0.06
    step = axis * (apart / 2)[:, None] + across * (lean / 2)[:, None]
    couple = torch.stack([middle + step, middle - step], 1)
    lone = 0.5 + _DIRECTIONS[place] * 0.24 + (chance[:, 2:] - 0.5) * 0.10
    lone = torch.stack([lone, torch.full_like(lone, 0.5)], 1)
    return torch.where(pair[:, None, None], couple, lone)


# ---- captions


def captions(scenes: Scenes) -> list[str]:
    """What the pictures show, in the vocabulary of `WORDS`."""
    columns = [getattr(scenes, field.name).tolist() for field in fields(scenes)]
    names = [field.name for field in fields(scenes)]
    return [_caption(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _caption(scene: dict[str, list[int]]) -> str:
    tells_size, tells_place, tells_backdrop, tells_light = scene["mention"]
    parts = [_object(scene, 0, bool(tells_size))]
    if scene["pair"]:
        parts += [RELATIONS[_index(scene["relation"])], _object(scene, 1, bool(tells_size))]
    elif tells_place:
        parts.append(PLACES[_index(scene["place"])])
    if tells_backdrop:
        parts.append(_backdrop(scene))
    if tells_light:
        parts.append(f"lit from the {LIGHTS[_index(scene['light'])]}")
    return " ".join(parts)


def _index(value: object) -> int:
    assert isinstance(value, int)
    return value


def _object(scene: dict[str, list[int]], which: int, tells_size: bool) -> str:
    size, texture = SIZES[scene["size"][which]], TEXTURES[scene["texture"][which]]
    words = [size if tells_size and size != "medium" else "", _colour(scene, which)]
    words += [texture if texture != "plain" else "", SHAPES[scene["shape"][which]]]
    return _with_article(" ".join(word for word in words if word))


def _backdrop(scene: dict[str, list[int]]) -> str:
    kind, first, second = BACKDROPS[_index(scene["backdrop"])], _colour(scene, 2), _colour(scene, 3)
    if kind == "room":
        return f"on {_with_article(second)} floor before {_with_article(first)} wall"
    if kind == "gradient":
        return f"on {_with_article(first)} to {second} background"
    return f"on {_with_article(first if kind == 'plain' else f'{first} {kind}')} background"


def _colour(scene: dict[str, list[int]], which: int) -> str:
    return tuple(COLOURS)[scene["colour"][which]]


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _words() -> tuple[str, ...]:
    phrases = [*COLOURS, *SIZES, *TEXTURES, *SHAPES, *RELATIONS, *PLACES, *LIGHTS, *BACKDROPS]
    phrases += ["a an and on to before the lit from background floor wall"]
    return tuple(sorted(set(" ".join(phrases).split())))


WORDS = _words()


# ---- drawing


def draw(scenes: Scenes, height: int = 256, width: int = 256, night: bool = False) -> Tensor:
    """Draw the scenes: [B, 3, H, W] float32 in [0, 1], on the scenes' device.

    The scene fills the picture; shapes keep their proportions whatever the aspect ratio. At night the backdrop is
    dark and each object glows in its colour; captions say nothing of it.
    """
    shorter = min(height, width)
    device = scenes.radius.device
    y = (torch.arange(height, device=device) + 0.5).view(1, -1, 1) / shorter
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, -1) / shorter
    extent = torch.tensor([width / shorter, height / shorter], device=device)
    paint = _paint(scenes)
    light = _DIRECTIONS.to(device)[scenes.light]
    picture = _draw_backdrop(scenes, x, y, extent, paint, light)
    present = torch.stack([torch.ones_like(scenes.pair), scenes.pair], 1)
    layers = []
    for which in (0, 1):
        x0, y0 = (scenes.centre[:, which] * extent).unbind(1)
        radius = scenes.radius[:, which].view(-1, 1, 1)
        layers.append(
            _Local((x - x0.view(-1, 1, 1)) / radius, (y - y0.view(-1, 1, 1)) / radius, 1 / (radius * shorter))
        )
    if night:
        picture = picture * torch.tensor(_MOONLIGHT, device=device).view(1, 3, 1, 1)
        for which in (0, 1):
            picture = picture + _glow(scenes, which, layers[which], paint[:, which], present[:, which])
    for which in (1, 0):
        picture = _draw_object(picture, scenes, which, layers[which], paint[:, which], light, present[:, which])
    return picture.clamp(0, 1)


class _Local(NamedTuple):
    """Pixel positions [B, H, W] about an object's centre in radii, and a pixel's size [B, 1, 1]."""

    x: Tensor
    y: Tensor
    pixel: Tensor

    def turned(self, angle: Tensor) -> _Local:
        c, s = torch.cos(angle).view(-1, 1, 1), torch.sin(angle).view(-1, 1, 1)
        return _Local(c * self.x + s * self.y, c * self.y - s * self.x, self.pixel)

    def moved(self, x: Tensor, y: Tensor) -> _Local:
        return _Local(self.x - x.view(-1, 1, 1), self.y - y.view(-1, 1, 1), self.pixel)


def _paint(scenes: Scenes) -> Tensor:
    """Colours [B, 4, 3] with their tints."""
    palette = torch.tensor(list(COLOURS.values()), device=scenes.tint.device)
    return (palette[scenes.colour] + scenes.tint).clamp(0, 1)


def _accent(colour: Tensor, strength: float) -> Tensor:
    """The second colour of a texture: the same hue, darker for bright colours and lighter for dark ones."""
    bright = colour.mean(-1, keepdim=True) > 0.45
    return torch.where(bright, colour * (1 - strength), colour + (1 - colour) * strength)


def _draw_backdrop(scenes: Scenes, x: Tensor, y: Tensor, extent: Tensor, paint: Tensor, light: Tensor) -> Tensor:
    across, down = x / extent[0] - 0.5, y / extent[1] - 0.5
    along = across * light[:, 0].view(-1, 1, 1) + down * light[:, 1].view(-1, 1, 1)
    start = scenes.phase[:, 2]
    pixel = 4 * extent[0] / x.shape[2]  # textures are a quarter of the picture to the radius
    local = _Local((x - start[:, 0].view(-1, 1, 1)) * 4, (y - start[:, 1].view(-1, 1, 1)) * 4, pixel)
    first, second = paint[:, 2, :, None, None], paint[:, 3, :, None, None]
    kind = scenes.backdrop.view(-1, 1, 1)
    texture = torch.where(kind == 2, _stripes(local), torch.where(kind == 3, _checks(local), 0.0))
    ramp = torch.where(kind == 1, y / extent[1], 0.0)
    floor = torch.where(kind == 4, ((down + 0.5 - _HORIZON) * 120).clamp(0, 1), 0.0)
    accent = _accent(paint[:, 2], 0.22)[:, :, None, None]
    picture = torch.lerp(first, accent, texture[:, None])
    picture = torch.lerp(picture, second, torch.maximum(ramp, floor)[:, None])
    return picture * (1 + 0.35 * along[:, None])


def _draw_object(
    picture: Tensor, scenes: Scenes, which: int, place: _Local, colour: Tensor, light: Tensor, present: Tensor
) -> Tensor:
    turn, shape = scenes.turn[:, which], scenes.shape[:, which]
    present = present.view(-1, 1, 1)
    cast = place.moved(-0.28 * light[:, 0], -0.28 * light[:, 1]).turned(turn)
    shadow = torch.sigmoid(-_distance(cast, shape) / 0.07) * present * 0.45
    picture = picture * (1 - shadow[:, None])

    local = place.turned(turn)
    distance = _distance(local, shape)
    surface = _surface(scenes, which, local, colour)
    shade, highlight = _lighting(distance, place, light, scenes.texture[:, which] == TEXTURES.index("glossy"))
    surface = surface * shade[:, None] + highlight[:, None]
    cover = (0.5 - distance / place.pixel).clamp(0, 1) * present
    return torch.lerp(picture, surface, cover[:, None])


def _glow(scenes: Scenes, which: int, place: _Local, colour: Tensor, present: Tensor) -> Tensor:
    """Light that an object throws on the backdrop at night, [B, 3, H, W]; black ones throw a little grey."""
    distance = _distance(place.turned(scenes.turn[:, which]), scenes.shape[:, which]).clamp(min=0)
    strength = 0.75 * torch.exp(-distance / 0.4) * present.view(-1, 1, 1)
    return strength[:, None] * (colour * 0.8 + 0.2)[:, :, None, None]


def _distance(local: _Local, shape: Tensor) -> Tensor:
    """Signed distance to the outline, negative inside, in radii: [B, H, W]."""
    x, y = local.x, local.y
    kind = shape.view(-1, 1, 1)
    rho = torch.hypot(x, y)
    cross = torch.minimum(torch.maximum(x.abs() - 0.95, y.abs() - 0.34), torch.maximum(x.abs() - 0.34, y.abs() - 0.95))
    ring = (rho - 0.70).abs() - 0.24
    round_or_cross = torch.where(kind == 0, rho - 0.86, torch.where(kind == 1, ring, cross))
    return torch.where(kind < 3, round_or_cross, _star_polygon(x, y, rho, shape))


def _star_polygon(x: Tensor, y: Tensor, rho: Tensor, shape: Tensor) -> Tensor:
    """Distance to a polygon whose corners alternate between radius 1 and an inner radius.

    One sector about a corner is enough: the rest folds onto it, and its edge is one straight line.
    """
    table = torch.tensor([(3.0, 0.5, 0.0)] * 3 + [_POLYGONS[name] for name in SHAPES[3:]], device=x.device)
    corners, inner, turn = (column.view(-1, 1, 1) for column in table[shape].unbind(1))
    half = math.pi / corners
    angle = torch.remainder(torch.atan2(x, -y) + turn + half, 2 * half) - half
    along, across = rho * torch.cos(angle), rho * torch.sin(angle).abs()
    edge_x, edge_y = inner * torch.cos(half) - 1, inner * torch.sin(half)
    return ((along - 1) * edge_y - across * edge_x) / torch.hypot(edge_x, edge_y)


def _surface(scenes: Scenes, which: int, local: _Local, colour: Tensor) -> Tensor:
    """The object's colour before lighting, [B, 3, H, W]."""
    start = scenes.phase[:, which]
    moved = local.moved(start[:, 0] * 0.5, start[:, 1] * 0.5)
    kind = scenes.texture[:, which].view(-1, 1, 1)
    amount = torch.where(kind == 2, _stripes(moved), torch.where(kind == 3, _checks(moved), 0.0))
    amount = torch.where(kind == 4, _dots(moved, 0.0), torch.where(kind == 5, _dots(moved, 0.7), amount))
    return torch.lerp(colour[:, :, None, None], _accent(colour, 0.6)[:, :, None, None], amount[:, None])


def _step(wave: Tensor, pixel: Tensor) -> Tensor:
    """0 or 1 by the sign of a distance in radii, softened over one pixel."""
    return (0.5 + wave / pixel).clamp(0, 1)


def _stripes(local: _Local) -> Tensor:
    period = 0.56
    return _step(((local.x / period).remainder(1) - 0.5).abs() * period - period / 4, local.pixel)


def _checks(local: _Local) -> Tensor:
    period = 0.9
    x = ((local.x / period).remainder(1) - 0.5).abs() * period - period / 4
    y = ((local.y / period).remainder(1) - 0.5).abs() * period - period / 4
    return _step(torch.where(x * y > 0, 1, -1) * torch.minimum(x.abs(), y.abs()), local.pixel)


def _dots(local: _Local, disorder: float) -> Tensor:
    """Dots on a grid; with disorder they leave its points and differ in size."""
    period = 0.5 if disorder == 0 else 0.36
    u, v = local.x / period, local.y / period
    column, row = torch.floor(u), torch.floor(v)
    dx = u - column - 0.5 - disorder * 0.5 * (_hash(column, row, 1) - 0.5)
    dy = v - row - 0.5 - disorder * 0.5 * (_hash(column, row, 2) - 0.5)
    radius = 0.30 - disorder * 0.32 * (_hash(column, row, 3) - 0.35)
    return _step((radius - torch.hypot(dx, dy)) * period, local.pixel)


def _hash(column: Tensor, row: Tensor, salt: int) -> Tensor:
    """A number in [0, 1) for each cell; integer arithmetic, so equal on every device."""
    mixed = (column.long() * 73856093) ^ (row.long() * 19349663) ^ (salt * 83492791)
    mixed = (mixed ^ (mixed >> 13)) * 1274126177 & 0x7FFFFFFF
    return (mixed % 1021).float() / 1021


def _lighting(distance: Tensor, place: _Local, light: Tensor, glossy: Tensor) -> tuple[Tensor, Tensor]:
    """Brightness of a bevelled surface and its highlight, both [B, H, W]."""
    depth = (-distance / 0.5).clamp(0, 1)
    slope_y, slope_x = torch.gradient(distance, dim=(1, 2))
    toward = slope_x * light[:, 0].view(-1, 1, 1) + slope_y * light[:, 1].view(-1, 1, 1)
    shade = 1 + 0.55 * (1 - depth) * toward / place.pixel
    spot = place.moved(0.38 * light[:, 0], 0.38 * light[:, 1])
    highlight = torch.exp(-(spot.x**2 + spot.y**2) / 0.09) * glossy.view(-1, 1, 1) * 0.8
    return shade.clamp(0.4, 1.45), highlight
