"""TensorRT engines: PyTorch → ONNX → surgery → plan → refitted with the host's weights."""

from .backend import TensorRTBackend

__all__ = ["TensorRTBackend"]
