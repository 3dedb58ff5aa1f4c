"""Build Engine: makes engines before the first picture needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io, ui

from .shared.accelerated_output import HIDDEN
from .shared.inputs import BLOCKS_OF_MODELS, backend_input, engine_inputs, optimize_input, precision_input
from .shared.search import ENGINES, found_by

if TYPE_CHECKING:
    from ..engine_cache import Entry
    from ..runtime.settings.model_settings import Settings


class BuildEngine(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamBuildEngine",
            display_name="Build Engine",
            category="Slipstream",
            description="Builds engines now, with a progress bar, and checks them against the model. An engine that "
            "exists already is only checked. Cancel stops the build and leaves nothing behind.",
            **found_by(ENGINES),
            inputs=[
                io.Model.Input("model", tooltip="The model to build for, with the LoRA that it will have."),
                io.String.Input("resolutions", default="512x512", tooltip="Picture sizes, such as 512x512, 768x512."),
                io.Int.Input(
                    "batch",
                    default=2,
                    min=1,
                    max=64,
                    tooltip="Samples in one call of the model: 2 for one picture with CFG (prompt and negative "
                    "prompt), 1 with CFG 1, 2 per picture for batches.",
                ),
                io.Int.Input(
                    "tokens",
                    default=77,
                    min=1,
                    max=77 * 16,
                    tooltip="Length of the text: 77 for prompts up to 75 words or so, 154 for the next 75.",
                ),
                backend_input(with_off=False),
                precision_input(),
                optimize_input(BLOCKS_OF_MODELS),
                *engine_inputs(),
            ],
            outputs=[
                io.Model.Output(tooltip="The same model. Lead it on to Accelerate Model: building then comes first."),
                io.String.Output(display_name="report", tooltip="A line for each engine: ready, or why not."),
            ],
            hidden=HIDDEN,
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        from ..hosts.comfy.building.built_engines import BUILT_ENGINES
        from ..hosts.comfy.process.shared_provider import provider

        return BUILT_ENGINES.fingerprint(provider())

    @classmethod
    def execute(
        cls,
        model: Any,
        resolutions: str,
        batch: int,
        tokens: int,
        backend: str,
        precision: str,
        optimize: str,
        **engines: Any,
    ) -> io.NodeOutput:
        from ..runtime.settings.model_settings import Settings

        settings = Settings.of_text(
            backend=backend,
            precision=precision,
            optimize=optimize,
            build="first use",
            resolutions=resolutions,
            **engines,
        )
        report = "\n".join(_built(cls.hidden, model, settings, batch, tokens))
        return io.NodeOutput(model, report, ui=ui.PreviewText(report))


def _built(hidden: Any, model: Any, settings: Settings, batch: int, tokens: int) -> list[str]:
    """A line for each engine.

    Where a dry run added the node for a list of sizes, it may say why there is none: that run meets the shapes that
    this node cannot know.
    """
    from ..core.errors import UnsupportedModel
    from ..core.spec import Optimize
    from ..hosts.comfy.building.build_engines import build_blocks, build_engines
    from ..hosts.comfy.building.built_engines import BUILT_ENGINES
    from ..hosts.comfy.dry_run.build_prompt import is_added
    from ..hosts.comfy.node_state.watched_nodes import watch
    from ..hosts.comfy.process.shared_provider import provider
    from ..runtime.module import AcceleratedModule

    module = AcceleratedModule(provider(), settings, by_hand=True)
    is_users = not is_added(hidden.prompt, hidden.unique_id)
    if is_users:
        watch(module, hidden.unique_id, hidden.extra_pnginfo)
    try:
        if settings.optimize is Optimize.BLOCKS:
            found = build_blocks(module, model, batch, tokens)
            entries, lines = found, [_line(entry) for entry in found]
        else:
            made = build_engines(module, model, batch, tokens)
            entries, lines = [engine.entry for engine in made], [str(engine) for engine in made]
    except UnsupportedModel as error:
        if is_users:
            raise
        return [str(error)]
    BUILT_ENGINES.note([entry.digest for entry in entries])
    return lines


def _line(entry: Entry) -> str:
    manifest = entry.manifest
    return f"{manifest.label}: {manifest.precision_name}, built in {manifest.build.seconds:.0f} s, ready"
