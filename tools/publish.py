"""Makes the pack ready for Comfy's registry, or says what is missing.

    python tools/publish.py            # checks, and writes what publisher.toml says into pyproject.toml
    python tools/publish.py --check    # checks, and changes nothing

Afterwards `comfy node publish` sends it. Standard library alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 12 * 2**20
"""Of the installed folder; more than half of it are the demo model's weights."""
_FIELD = re.compile(r'^(\w+) = "(.*)"$', re.MULTILINE)
_ADDRESS = re.compile(r"https://[\w.-]+/\S+")


def publisher(root: Path = ROOT) -> dict[str, str]:
    """What publisher.toml says."""
    return dict(_FIELD.findall((root / "publisher.toml").read_text(encoding="utf-8")))


def missing(fields: dict[str, str]) -> Iterator[str]:
    """What the publisher has still to fill in, a line each."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", fields.get("publisher_id", "")):
        yield "publisher_id: the name of your account at Comfy's registry, in lower case"
    for name, what in (("repository", "the repository's address"), ("icon", "the address of a square picture")):
        if not _ADDRESS.fullmatch(fields.get(name, "")):
            yield f"{name}: {what}, which begins with https://"


def filled(text: str, fields: dict[str, str]) -> str:
    """pyproject.toml's text with the publisher's facts."""
    repository = fields["repository"].rstrip("/")
    urls = {
        "Homepage": repository,
        "Repository": repository,
        "Documentation": f"{repository}#readme",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    text = re.sub(r"\[project\.urls\]\n(?:.+\n)*", lambda _: f"[project.urls]\n{lines}", text)
    text = re.sub(r'^PublisherId = ".*"$', f'PublisherId = "{fields["publisher_id"]}"', text, flags=re.MULTILINE)
    return re.sub(r'^Icon = ".*"$', f'Icon = "{fields["icon"]}"', text, flags=re.MULTILINE)


def installed_files(root: Path = ROOT) -> list[Path]:
    """The files that the registry hands out: those in git, without what .comfyignore names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    rules = (root / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = tuple(rule.strip() for rule in rules if rule.strip() and not rule.startswith("#"))
    names = [name for name in listed.split("\0") if name and not name.startswith(left_out)]
    return [root / name for name in names if (root / name).is_file()]


def main(arguments: list[str]) -> int:
    fields = publisher()
    problems = [f"publisher.toml lacks {each}" for each in missing(fields)]
    try:
        size = sum(file.stat().st_size for file in installed_files())
    except (OSError, subprocess.CalledProcessError):
        print("Run this in a git clone of the pack: git knows which files belong to it", file=sys.stderr)
        return 1
    if size > MOST_BYTES:
        problems.append(f"The installed folder has {size / 2**20:.1f} MB, more than {MOST_BYTES / 2**20:.0f}")
    if problems:
        print("Not ready to be published:", *problems, sep="\n- ", file=sys.stderr)
        return 1
    if "--check" not in arguments:
        project = ROOT / "pyproject.toml"
        project.write_text(filled(project.read_text(encoding="utf-8"), fields), encoding="utf-8")
    print(f"Ready: {size / 2**20:.1f} MB. Publish with: comfy node publish")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
