"""How builds are configured, reported and retried, and what is said when they fail."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from slipstream.core.errors import BuildFailed, UnsupportedModel
from slipstream.core.progress import Progress
from slipstream.core.spec import Precision
from slipstream.tests.unit.trt_backend.support import DYNAMIC, THREE, Bench, make_spec, make_weights
from slipstream.trt_backend import build

SHORT = "Cuda Runtime (out of memory)"


def test_what_is_set(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path, make_spec(Precision.FP16, level=5, aux_streams=1))
    bench.build()
    (made,) = bench.script.builds
    assert made.settings["builder_optimization_level"] == 5 and made.settings["max_aux_streams"] == 1
    assert made.workspace is None and made.profiles == [] and made.known is None
    if release in ("8.6.1", "10.0.1"):
        assert "REFIT" in made.flags and not made.refittable
    else:
        assert made.flags == {"REFIT_INDIVIDUAL", "STRIP_PLAN"} and made.refittable == set(bench.graph.weights)


def test_without_strong_types_timesteps_stay_in_fp32(tmp_path: Path) -> None:
    bench = Bench("8.6.1", tmp_path, make_spec(Precision.FP16))
    bench.build()
    (made,) = bench.script.builds
    assert {"FP16", "PREFER_PRECISION_CONSTRAINTS"} <= made.flags
    kinds = {node.name: node.op_type for node in bench.graph.model.graph.node}
    assert {kinds[name] for name in made.wide} == {"Sin", "Mul"}
    bench = Bench("8.6.1", tmp_path)
    bench.build()
    assert bench.script.builds[0].flags == {"REFIT"} and not bench.script.builds[0].wide


def test_fp32_is_not_rounded_on_its_way(release: str, tmp_path: Path) -> None:
    """TensorRT computes fp32 in TF32 unless it is told."""
    for precision, cleared in ((Precision.FP32, ["TF32"]), (Precision.FP16, None)):
        bench = Bench(release, tmp_path / precision.value, make_spec(precision))
        bench.build()
        assert bench.script.builds[0].settings.get("cleared") == cleared


def test_profiles(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path, make_spec(profiles=(DYNAMIC,)))
    bench.build()
    assert bench.script.builds[0].profiles == [
        {
            "x": ((1, 4, 8, 8), (2, 4, 12, 12), (4, 4, 24, 24)),
            "timesteps": ((1,), (2,), (4,)),
            "context": ((1, 5, 8), (2, 5, 8), (4, 5, 8)),
        }
    ]


def test_profiles_that_tensorrt_refuses(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path, make_spec(profiles=THREE))
    bench.script.refusals["add_optimization_profile"] = "too many profiles"
    with pytest.raises(UnsupportedModel, match="does not take the shapes .*: too many profiles"):
        bench.build()


@pytest.mark.parametrize("there", [True, False])
def test_rtx_builds_for_the_gpu_that_is_there(release: str, tmp_path: Path, there: bool) -> None:
    bench = Bench(release, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: there)
        bench.build()
    (made,) = bench.script.builds
    assert made.capabilities == (["CURRENT"] if there and release == "rtx-1.7.1" else [])


@pytest.mark.parametrize(("share", "flag"), [(0.0, False), (0.49, False), (0.5, True), (1.0, True)])
def test_sparse_weights(release: str, tmp_path: Path, share: float, flag: bool) -> None:
    bench = Bench(release, tmp_path, numbers=make_weights())
    bench.build(sparse_share=share)
    assert ("SPARSE_WEIGHTS" in bench.script.builds[0].flags) == flag


# ------------------------------------------------------------------------------------------------- failures


def test_what_the_parser_says(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    bench.script.parser_error = "Unsupported operator FancyAttention"
    with pytest.raises(
        UnsupportedModel, match=r"cannot read the model: Unsupported operator FancyAttention \(node 0\)"
    ):
        bench.build()
    assert not bench.script.builds


def test_an_operator_that_tensorrt_does_not_know(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path)
    model = onnx.load(str(bench.path), load_external_data=False)
    model.graph.node[3].domain, model.graph.node[3].op_type = "com.example", "Sparkle"
    bench.path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModel, match=r"Plugin not found for operator Sparkle \(node 3\)"):
        bench.build()


def test_a_weight_that_the_network_does_not_know(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path)
    bench.graph.weights["ghost"] = next(iter(bench.graph.weights.values()))
    with pytest.raises(UnsupportedModel, match=r"cannot let 1 weights be replaced, such as ghost; switch bake on"):
        bench.build()


def test_a_build_without_a_plan(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    bench.script.build_errors = ["Could not find any implementation for node Conv_0"]
    with pytest.raises(
        BuildFailed,
        match=r"made no engine: Could not find any implementation for node Conv_0\. Choose backend compiled, or report",
    ) as raised:
        bench.build()
    assert bench.library.version in str(raised.value) and torch.__version__ in str(raised.value)
    assert len(bench.script.builds) == 1


def test_errors_of_an_earlier_build_are_not_told_again(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path)
    bench.script.build_errors = [SHORT, "Something else"]
    with pytest.raises(BuildFailed) as raised:
        bench.build()
    assert "made no engine: Something else. " in str(raised.value)


def test_smaller_workspaces_where_memory_is_short(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(release, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 << 30, 16 << 30))
    bench.script.build_errors = [SHORT, SHORT]
    told: list[Progress] = []
    assert bench.build(told.append)
    assert [made.workspace for made in bench.script.builds] == [None, 4 << 30, 2 << 30]
    again = [report.message for report in told if "again" in report.message]
    assert again == ["again, within 4096 MB of workspace", "again, within 2048 MB of workspace"]


def test_memory_that_never_suffices(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(release, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 16 << 30))
    bench.script.build_errors = [SHORT] * 9
    with pytest.raises(
        BuildFailed, match=r"ran out of GPU memory while it built Small unet .* 256 MB too\. Unload other"
    ):
        bench.build()
    assert [made.workspace for made in bench.script.builds] == [None, 512 << 20, 256 << 20]


# ------------------------------------------------------------------------------------------------- progress


def test_phases_are_reported(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_REPORT_SECONDS", 0.0)
    bench = Bench(release, tmp_path)
    told: list[Progress] = []
    bench.build(told.append)
    assert {report.operations for report in told} == {bench.nodes} and {report.phase for report in told} == {"compile"}
    first, *phases = [report.message for report in told]
    assert first == f"building {bench.nodes} operations"
    if release == "8.6.1":  # which has no progress monitor
        assert not phases
    else:
        assert phases[0] == "Building engine 0/2"
        assert [f"Timing tactics {step}/3" for step in range(4)] == phases[1:]


def test_reports_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(build.time, "monotonic", lambda: 10_000.0)
    told: list[Progress] = []
    Bench("11.4.0", tmp_path).build(told.append)
    assert len(told) == 2
