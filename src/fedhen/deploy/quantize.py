"""Quantises ONNX models to int8: convolutions and matrix products, calibrated on training examples."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedhen.deploy.quiet import quiet
from fedhen.errors import FedhenError, one_line

SCHEME = "static QDQ: uint8 activations, int8 weights by channel; convolutions and matrix products"
OPERATORS = ["Conv", "Gemm", "MatMul"]
AT_ONCE = 20
Arrays = Mapping[str, Any]


class _Examples:
    """Calibration data as onnxruntime reads it: batches until None."""

    def __init__(self, values: Arrays, axes: Mapping[str, int]) -> None:
        name = next(iter(values))
        number = values[name].shape[axes.get(name, 0)]
        self.batches = iter(
            {
                key: np.ascontiguousarray(array.take(range(begin, min(begin + AT_ONCE, number)), axes.get(key, 0)))
                for key, array in values.items()
            }
            for begin in range(0, number, AT_ONCE)
        )

    def get_next(self) -> Arrays | None:
        return next(self.batches, None)


def quantize(model: Any, values: Arrays, axes: Mapping[str, int]) -> Any:
    """Returns the int8 form of an ONNX model. `values` are examples of its inputs, `axes` their batch dimensions."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(_Examples, CalibrationDataReader):  # type: ignore[misc]
        pass

    with tempfile.TemporaryDirectory() as folder:
        before, prepared, after = (str(Path(folder, f"{name}.onnx")) for name in ("float", "prepared", "int8"))
        onnx.save(model, before)
        try:
            with quiet():
                quant_pre_process(before, prepared, skip_symbolic_shape=True)
                quantize_static(
                    prepared,
                    after,
                    Reader(values, axes),
                    quant_format=QuantFormat.QDQ,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                    per_channel=True,
                    op_types_to_quantize=OPERATORS,
                )
        except OSError:
            raise
        except Exception as error:
            raise FedhenError(f"the model cannot be quantised: {one_line(str(error))[:200]}") from error
        quantized = onnx.load(after)
    for props in (quantized.metadata_props, quantized.graph.metadata_props):
        del props[:]
    for node in quantized.graph.node:
        del node.metadata_props[:]
    del quantized.graph.value_info[:]
    return quantized
