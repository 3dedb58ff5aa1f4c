"""A job crosses to the worker process as plain data that can name nothing but this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compile_backend import AOTInductorBackend
from slipstream.core.errors import UnsupportedModel
from slipstream.core.protocols import BuildJob
from slipstream.core.spec import Role
from slipstream.runtime.building.job_file import JOB, as_plain, from_plain, read_job, write_job
from slipstream.tests.fakes import make_plan


def carried(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(as_plain(value))))


def test_a_job_arrives_as_it_left(tmp_path: Path) -> None:
    plan = make_plan(8, AOTInductorBackend())
    job = BuildJob(tmp_path, plan.spec, plan.architecture, plan.device, plan.key.environment, keep=tmp_path / "keep")
    write_job(job)
    assert read_job(tmp_path) == job


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2.5, "ü", [1, [2]], (1, (2, "x")), {"a": (1,), 2: None}, {1, 2}, frozenset({"x"}), Path("/x y"),
        torch.device("cuda", 1), torch.float8_e4m3fn, Role.VAE_DECODE, {"list": [{"call": "x"}]},
    ],
    ids=repr,
)  # fmt: skip
def test_values_of_every_kind(value: Any) -> None:
    found = carried(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [object(), lambda: None, print, json.dumps, torch.nn.Linear, torch.nn.Identity()])
def test_what_is_not_of_this_package_is_not_written(value: Any) -> None:
    with pytest.raises(UnsupportedModel):
        as_plain({"x": value})


@pytest.mark.parametrize(
    "data",
    [
        {"call": "os:system", "arguments": ["true"]},
        {"call": "..os:system", "arguments": ["true"]},
        {"call": "runtime.building.job_file:importlib.import_module", "arguments": ["os"]},
        {"call": "core.programs:run", "arguments": [["true"]]},
        {"call": "core.programs:subprocess.run", "arguments": [["true"]]},
        {"call": "runtime.building.worker_process:no_such_function"},
        {"call": "runtime.building.job_file:os.system", "arguments": ["true"]},
        {"named": "runtime.building.job_file:JOB"},
        {"named": ":eval"},
        {"named": "builtins"},
        {"dtype": "load"},
        {"pickle": "x"},
    ],
    ids=str,
)
def test_a_file_cannot_name_anything_else(data: Any) -> None:
    with pytest.raises((UnsupportedModel, ImportError)):
        from_plain(data)


def test_a_file_that_is_no_job(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text(json.dumps({"path": [], "job": [1]}))
    with pytest.raises(AssertionError):
        read_job(tmp_path)
