"""What builds measure is kept for the next one, and never in its way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slipstream.tests.unit.trt_backend.support import Bench
from slipstream.trt_backend.timing_cache import TimingCache


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


def test_the_next_build_knows_what_the_last_one_measured(release: str, tmp_path: Path) -> None:
    for expected in (False, True):
        bench = Bench(release, tmp_path / "job", keep=tmp_path / "keep")
        bench.build()
        assert ("Conv" in (bench.script.builds[0].known or ())) == expected
    (kept,) = files(tmp_path / "keep")
    assert kept.suffix == ".cache"


def test_what_others_measured_meanwhile_is_kept_too(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path / "job", keep=tmp_path / "keep")
    bench.build()
    (path,) = files(tmp_path / "keep")
    config = bench.library.new_builder().create_builder_config()
    bench.cache.lend(config)
    theirs = config.create_timing_cache(b"")
    theirs._known |= {"theirs"}
    path.write_bytes(bytes(theirs.serialize()))
    bench.cache.learn(config)
    assert b"theirs" in path.read_bytes() and b"Conv" in path.read_bytes()


@pytest.mark.parametrize("content", [b"garbage", b"", b"ptrt{", b"ptrt" + bytes(1000)])
def test_a_damaged_one_is_ignored_and_replaced(release: str, tmp_path: Path, content: bytes) -> None:
    bench = Bench(release, tmp_path / "job", keep=tmp_path / "keep")
    bench.build()
    (path,) = files(tmp_path / "keep")
    path.write_bytes(content)
    bench = Bench(release, tmp_path / "job", keep=tmp_path / "keep")
    bench.build()
    assert bench.script.builds[0].known == set()
    assert b"Conv" in path.read_bytes()


def test_one_that_does_not_fit_this_card(release: str, tmp_path: Path) -> None:
    Bench(release, tmp_path / "job", keep=tmp_path / "keep").build()
    bench = Bench(release, tmp_path / "job", keep=tmp_path / "keep")
    bench.script.refusals["set_timing_cache"] = "The timing cache is of another device."
    bench.build()
    assert bench.script.builds[0].known == set(), "it learns anew"


def test_each_version_and_card_has_its_own(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    for release in ("10.16.1", "11.4.0", "rtx-1.7.1"):
        bench = Bench(release, tmp_path / "job", keep=keep)
        bench.build()
        assert bench.script.builds[0].known == set()
    bench = Bench("11.4.0", tmp_path / "job", keep=keep)
    bench.cache = TimingCache(keep, "tensorrt 11.4.0", "NVIDIA GeForce RTX 4090")
    bench.build()
    assert len(files(keep)) == 4
    assert all("/" not in path.name and " " not in path.name for path in files(keep))


def test_nothing_is_kept_of_a_failed_build(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path / "job", keep=tmp_path / "keep")
    bench.script.build_errors = ["no"]
    with pytest.raises(Exception, match="no"):
        bench.build()
    assert not (tmp_path / "keep").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "keep").write_text("a file")
    bench = Bench("11.4.0", tmp_path / "job", keep=tmp_path / "keep")
    with caplog.at_level(logging.WARNING, "slipstream.trt_backend.timing_cache"):
        assert bench.build()
    assert "timing cache of this build could not be saved" in caplog.text


def test_it_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = tmp_path / "keep"
    Bench("11.4.0", tmp_path / "job", keep=keep).build()
    (path,) = files(keep)
    before = path.read_bytes()

    def torn(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    bench = Bench("11.4.0", tmp_path / "job", keep=keep)
    monkeypatch.setattr(Path, "write_bytes", torn)
    assert bench.build()
    assert path.read_bytes() == before and files(keep) == [path]
