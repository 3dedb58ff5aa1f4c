"""The demo model's scenes, edges and words."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from slipstream.demo import scenes, text  # noqa: E402
from slipstream.demo.canny import canny  # noqa: E402


def one(**chosen):
    """A scene of one large plain shape in the middle, unless told otherwise."""
    scene = scenes.sample(1, 0)
    values = {
        "pair": torch.tensor([False]),
        "shape": torch.tensor([[0, 0]]),
        "texture": torch.tensor([[0, 0]]),
        "colour": torch.tensor([[0, 1, 5, 3]]),
        "tint": torch.zeros(1, 4, 3),
        "centre": torch.full((1, 2, 2), 0.5),
        "radius": torch.full((1, 2), 0.25),
        "turn": torch.zeros(1, 2),
        "backdrop": torch.tensor([0]),
        "mention": torch.ones(1, 4, dtype=torch.bool),
    }
    return dataclasses.replace(scene, **(values | chosen))


def pixel(picture, x, y):
    """The colour at a place given in fractions."""
    height, width = picture.shape[2:]
    return picture[0, :, int(y * height), int(x * width)]


def named(name):
    return torch.tensor(scenes.COLOURS[name])


def test_a_seed_always_gives_the_same_scene():
    first, second, other = scenes.example(7, 64, 64), scenes.example(7, 64, 64), scenes.example(8, 64, 64)
    assert torch.equal(first.picture, second.picture) and first.caption == second.caption
    assert torch.equal(first.edges, second.edges)
    assert not torch.equal(first.picture, other.picture) and first.caption != other.caption


@pytest.mark.parametrize("size", [(128, 128), (128, 192), (96, 64)])
def test_pictures_fill_their_range_at_every_size(size):
    pictures = scenes.draw(scenes.sample(6, 3), *size)
    assert pictures.shape == (6, 3, *size) and pictures.dtype == torch.float32
    assert pictures.isfinite().all() and pictures.min() >= 0 and pictures.max() <= 1
    assert (pictures.flatten(1).std(1) > 0.02).all()


def test_a_drawing_does_not_depend_on_its_batch():
    batch = scenes.sample(5, 11)
    alone = scenes.Scenes(*(getattr(batch, field.name)[3:4] for field in dataclasses.fields(batch)))
    torch.testing.assert_close(scenes.draw(batch, 64, 64)[3], scenes.draw(alone, 64, 64)[0])


def test_the_shape_is_where_and_what_the_scene_says():
    picture = scenes.draw(one(centre=torch.tensor([[[0.3, 0.4], [0.5, 0.5]]])), 128, 128)
    assert (pixel(picture, 0.3, 0.4) - named("red")).abs().max() < 0.15
    assert (pixel(picture, 0.85, 0.85) - named("blue")).abs().max() < 0.3


def test_shapes_keep_their_proportions_in_a_wide_picture():
    red = scenes.draw(one(), 64, 128)[0, 0] > 0.5
    across, down = red.any(0).sum(), red.any(1).sum()
    assert abs(int(across) - int(down)) <= 2 and 24 <= int(down) <= 30


@pytest.mark.parametrize(("shape", "share"), [("circle", 0.145), ("square", 0.125), ("triangle", 0.081)])
def test_shapes_have_their_area(shape, share):
    red = scenes.draw(one(shape=torch.tensor([[scenes.SHAPES.index(shape), 0]])), 256, 256)[0, 0] > 0.35
    assert float(red.float().mean()) == pytest.approx(share, rel=0.06)


def test_the_light_comes_from_its_side():
    def brightness(light):
        picture = scenes.draw(one(light=torch.tensor([scenes.LIGHTS.index(light)])), 64, 64).mean((0, 1))
        return picture[:, :8].mean() - picture[:, -8:].mean()

    assert brightness("left") > 0.02 and brightness("right") < -0.02


def test_a_caption_tells_the_scene():
    scene = one(
        pair=torch.tensor([True]),
        shape=torch.tensor([[0, 3]]),
        size=torch.tensor([[1, 2]]),
        texture=torch.tensor([[2, 0]]),
        colour=torch.tensor([[0, 5, 3, 1]]),
        relation=torch.tensor([2]),
        light=torch.tensor([1]),
    )
    wanted = "a red striped circle above a large blue square on a green background lit from the right"
    assert scenes.captions(scene) == [wanted]


def test_pairs_stand_as_their_relation_says():
    some = scenes.sample(200, 5)
    offset = some.centre[:, 0] - some.centre[:, 1]
    for index, (axis, sign) in enumerate([(0, -1), (0, 1), (1, -1), (1, 1)]):
        rows = some.pair & (some.relation == index)
        assert rows.sum() > 10 and (offset[rows, axis] * sign > 0.3).all()
    gap = offset.norm(dim=1) - some.radius.sum(1)
    assert (gap[some.pair] > 0).all(), "objects overlap"


def test_every_caption_can_be_read():
    for caption in scenes.captions(scenes.sample(500, 2)):
        assert text.tokenize(caption).shape == (1, text.CHUNK)


# ---- edges


def test_edges_follow_an_outline_one_pixel_wide():
    picture = torch.zeros(1, 3, 64, 64)
    picture[:, :, 16:48, 20:40] = 1
    edges = canny(picture)[0, 0]
    row, column = edges[32].nonzero().flatten().tolist(), edges[:, 30].nonzero().flatten().tolist()
    assert len(row) == 2 and abs(row[0] - 20) <= 1 and abs(row[1] - 40) <= 1
    assert len(column) == 2 and abs(column[0] - 16) <= 1 and abs(column[1] - 48) <= 1
    assert not edges[:10].any()


def test_edges_between_equally_bright_colours_are_seen():
    picture = torch.zeros(1, 3, 32, 32)
    picture[:, 0, :, :16], picture[:, 2, :, 16:] = 0.5, 0.5
    assert canny(picture)[0, 0, 4:28, 14:18].any(1).all()


def test_a_weak_edge_counts_only_where_it_meets_a_strong_one():
    picture = torch.zeros(1, 3, 48, 48)
    picture[:, :, :, 24:] = 0.11  # weak, all the way down
    assert not canny(picture).any()
    picture[:, :, :, 24:] = torch.linspace(0.4, 0.11, 48)[:, None]  # the same at the foot, strong at the top
    assert canny(picture)[0, 0, :, 22:26].any(1).all()


# ---- words


def test_an_unknown_word_is_named_with_what_is_near():
    with pytest.raises(text.UnknownWord, match=r"'circl'.*circle"):
        text.tokenize("a red circl")
    assert torch.equal(text.tokenize("a red circl", ignore_unknown=True), text.tokenize("a red"))


def test_case_and_punctuation_do_not_matter():
    assert torch.equal(text.tokenize("A RED circle, above a square."), text.tokenize("a red circle above a square"))


@pytest.mark.parametrize(("words", "chunks"), [(0, 1), (75, 1), (76, 2), (150, 2), (151, 3)])
def test_long_prompts_take_more_chunks(words, chunks):
    ids = text.tokenize("red " * words)
    assert ids.shape == (chunks, text.CHUNK)
    assert (ids[:, 0] == text.START).all() and (ids[:, -1] == text.END).all()
    assert int(((ids != text.START) & (ids != text.END)).sum()) == words


def test_chunks_are_encoded_alone_and_joined():
    torch.manual_seed(0)
    encoder = text.TextEncoder(width=16, layers=2, heads=2).eval()
    long, short = "red " * 75 + "blue circle", "blue circle"
    both = encoder.encode([long, short])
    assert both.shape == (2, 154, 16)
    torch.testing.assert_close(both[0, 77:], encoder.encode(short)[0])
    torch.testing.assert_close(both[1, 77:], encoder.encode("")[0])


def test_word_order_matters_and_filling_does_not():
    torch.manual_seed(0)
    encoder = text.TextEncoder(width=16, layers=2, heads=2).eval()
    one_way, other_way = encoder.encode(["red circle blue square", "blue circle red square"])
    assert not torch.allclose(one_way[2], other_way[2], atol=1e-3)
    with torch.no_grad():
        encoder.positions[40:] += 1  # only filling lies there
    torch.testing.assert_close(encoder.encode("red circle blue square")[0, :6], one_way[:6])
