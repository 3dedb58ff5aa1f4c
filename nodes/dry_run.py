"""Internal nodes of the test runs that the button Build engine queues."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

_CATEGORY = "Slipstream/internal"


def _hidden_from_menus() -> dict[str, bool]:
    """Older ComfyUIs know no nodes for developers alone."""
    known = getattr(io.Schema, "__dataclass_fields__", {})
    return {"is_dev_only" if "is_dev_only" in known else "is_experimental": True}


class SlipstreamOneStep(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamOneStep",
            display_name="One Step (dry run)",
            category=_CATEGORY,
            description="Used by the button Build engine, not for pictures: samplers behind it take one step of each "
            "kind, so that every shape comes up for which an engine is needed.",
            inputs=[io.Model.Input("model", tooltip="The model that the sampler would get.")],
            outputs=[io.Model.Output(tooltip="That model, for a sampler whose result nobody looks at.")],
            **_hidden_from_menus(),
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        from ..hosts.comfy.dry_run.one_step import one_step

        return io.NodeOutput(one_step(model))


class SlipstreamDryRunEnd(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamDryRunEnd",
            display_name="Dry Run End",
            category=_CATEGORY,
            description="Used by the button Build engine, not for pictures: it ends a dry run and throws away what "
            "was made.",
            inputs=[io.AnyType.Input("value", tooltip="Whatever a sampler, decoder or encoder made.")],
            outputs=[],
            is_output_node=True,
            **_hidden_from_menus(),
        )

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput()
