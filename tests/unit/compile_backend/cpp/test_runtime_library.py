"""Packages are linked with the C++ runtime that torch uses, also where the compiler would take a static one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch._inductor.config as inductor

from slipstream.compile_backend.cpp.runtime_library import links_shared_runtime, shared_cpp_runtime
from slipstream.core.errors import BuildFailed

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux, whose linker this is about"
)


def compiler_script(folder: Path, command: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "g++"
    script.write_text(f"#!/bin/sh\nexec {command}\n")
    script.chmod(0o755)
    return script


def static_library(folder: Path) -> Path:
    """A folder in which the linker finds the static runtime alone."""
    found = subprocess.run(["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True)
    (folder / "lib").mkdir()
    (folder / "lib" / "libstdc++.a").symlink_to(found.stdout.strip())
    return folder / "lib"


def test_the_usual_compiler_needs_no_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    before = inductor.cpp.cxx
    with shared_cpp_runtime(tmp_path):
        assert inductor.cpp.cxx == before
    assert not list(tmp_path.iterdir())


def test_where_only_the_static_runtime_is_found_the_one_of_this_process_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine that lacks the link libstdc++.so. (gcc, unlike g++, adds no runtime library by itself.)
    lonely = compiler_script(tmp_path / "bin", f'gcc "$@" -L{static_library(tmp_path)} -lstdc++')
    monkeypatch.setenv("CXX", str(lonely))
    assert not links_shared_runtime(str(lonely))
    before = inductor.cpp.cxx
    with shared_cpp_runtime(tmp_path):
        (_, chosen) = inductor.cpp.cxx
        assert chosen != str(lonely) and links_shared_runtime(chosen)
    assert inductor.cpp.cxx == before


def test_a_compiler_that_insists_on_the_static_runtime_builds_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = compiler_script(tmp_path / "bin", 'g++ -static-libstdc++ "$@"')
    monkeypatch.setenv("CXX", str(stubborn))
    with pytest.raises(BuildFailed, match="statically.*install"), shared_cpp_runtime(tmp_path):
        pass


def test_a_compiler_that_fails_is_left_to_the_build(tmp_path: Path) -> None:
    assert links_shared_runtime(str(compiler_script(tmp_path, "false")))
