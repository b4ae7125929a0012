"""Graphs of torch.export and ONNX: preprocessing, model and answers in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from lib.data.loader import normalisation
from lib.data.types import Column, ImageSpec
from lib.errors import ConfigError
from train.tasks.answers import Answers

_LARGEST_FILE = 1 << 30  # bytes of weights in an ONNX file; more are put beside it


class Graph(nn.Module):
    """Preprocessing, model and answers in one: what pt2 and ONNX files have."""

    def __init__(self, model: nn.Module, spec: Any, answers: Answers) -> None:
        super().__init__()
        self.model, self._spec, self._postprocess = model, spec, answers.postprocess
        self.encoder: nn.Module = nn.Identity()
        if isinstance(spec, ImageSpec):
            self.encoder = _Pixels(spec)
        elif hasattr(spec, "columns"):
            self.encoder = _Row(spec.columns)

    def forward(self, inputs: Tensor) -> Tensor:
        """uint8 images (N, C, H, W), float64 rows (N, columns) or int64 tokens (N, T) -> answers (N, ...)."""
        return self._postprocess(self.model(self.encoder(inputs)), self._spec)


class _Pixels(nn.Module):
    scale: Tensor
    offset: Tensor

    def __init__(self, spec: ImageSpec) -> None:
        super().__init__()
        for name, values_C in zip(("scale", "offset"), normalisation(spec), strict=True):
            self.register_buffer(name, values_C[:, None, None])

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return images_NCHW.to(torch.float32) * self.scale + self.offset


class _Row(nn.Module):
    """Numbers in their units, nan for a missing one; categories by their place, any other for none."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        super().__init__()
        self._columns = columns

    def forward(self, rows_NF: Tensor) -> Tensor:
        parts = []
        for place, column in enumerate(self._columns):
            own_N1 = rows_NF[:, place : place + 1]
            if column.values:
                parts.append(own_N1 == torch.arange(len(column.values), dtype=rows_NF.dtype))
            else:
                scaled_N1 = (own_N1 - column.mean) / column.std
                parts.append(torch.where(scaled_N1.isnan(), 0.0, scaled_N1))
        return torch.cat([part.to(torch.float32) for part in parts], dim=1)


def write_graph(
    graph: Graph, given: npt.NDArray[Any], file: Path, impossible: Callable[[str], ConfigError]
) -> None:
    """Write the graph for any number of rows. Raises ConfigError, or what torch does, if that fails."""
    batch = {"inputs": {0: torch.export.Dim("batch")}}
    with torch.no_grad():
        program = torch.export.export(graph.eval(), (torch.from_numpy(given),), dynamic_shapes=batch)
    called = (node.target for node in program.graph.nodes if isinstance(node.target, OpOverload))
    if own := sorted({str(operator) for operator in called if operator.namespace not in ("aten", "prims")}):
        raise impossible(f"it calls {own[0]}, which is not an operator of torch")
    if file.suffix == ".pt2":
        torch.export.save(program, file)
        return
    large = sum(weight.nbytes for weight in graph.state_dict().values()) > _LARGEST_FILE
    quietly: dict[str, Any] = {"dynamo": True, "external_data": large, "verbose": False}
    try:
        torch.onnx.export(program, (), file, input_names=["inputs"], output_names=["outputs"], **quietly)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise impossible(str(cause).partition("\n")[0]) from error
