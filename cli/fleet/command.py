"""The command `build`: for a model, a workflow, or all models of a matrix."""

from __future__ import annotations

from argparse import Namespace

from ...engine_cache import EngineStore
from ..build import build as build_model
from ..build import check as check_model
from ..output import Output
from .matrix import build_matrix
from .workflow import build_workflow


def build(store: EngineStore, output: Output, options: Namespace) -> int:
    """Build what is named, or with --check say what is missing."""
    if options.workflow is not None:
        return build_workflow(store, output, options)
    if options.matrix is not None:
        return build_matrix(store, output, options)
    return (check_model if options.check else build_model)(store, output, options)
