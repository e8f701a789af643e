"""Rewrites a module for the GPU, with one kernel for GroupNorm and ReLU, mix pooling and some convolutions."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedhen.algorithm.failures import MAX_ERROR_LENGTH
from fedhen.data.inputs import Inputs
from fedhen.engines.cuda.convolutions import conv3x3, stem
from fedhen.engines.cuda.norms import add_norm_relu, norm_relu
from fedhen.engines.cuda.pooling import mix_pool
from fedhen.engines.equivalence import forms_agree
from fedhen.errors import one_line
from fedhen.hardware.memory import is_out_of_memory
from fedhen.models.pooling import MixPool

RELUS = (torch.relu, functional.relu, "relu")
SUMS = (operator.add, torch.add)


def fuse(module: nn.Module, sample: Inputs, tier: str) -> nn.Module:
    """Returns the module, over the same weights, rewritten to make fewer passes over memory.

    Returns the module itself, with a warning, if it cannot be rewritten or the new form differs on the sample.
    """
    if not isinstance(sample, Tensor):
        return module
    try:
        found = rewrite(module)
        if forms_agree(module, found, sample):
            return found
        reason = "its rewritten form computes something else"
    except Exception as error:  # Tracing a user's module may raise anything.
        if is_out_of_memory(error):
            raise
        reason = one_line(f"{type(error).__name__}: {error}")[:MAX_ERROR_LENGTH]
    _warn_once(f"tier {tier!r} runs as it is written, which is slower: {reason}")
    return module


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def rewrite(module: nn.Module) -> fx.GraphModule:
    """Replaces the layers that have a kernel here."""
    traced = fx.GraphModule(module, _Tracer().trace(module))
    for node in list(traced.graph.nodes):
        layer = traced.get_submodule(str(node.target)) if _is_simple_call(traced, node) else None
        if isinstance(layer, MixPool):
            _replace(traced.graph, node, mix_pool, ("alpha",), layer.kernel)
        elif type(layer) is nn.Conv2d and _is_simple_3x3(layer):
            _replace(traced.graph, node, stem if layer.in_channels < 8 else conv3x3, ("weight",))
        elif _is_relu(traced, node) and (norm := _norm_before(traced, node)) is not None:
            _fuse_norm(traced, norm, node)
        elif node.op == "call_method" and node.target == "view":
            # A tensor with its channels last cannot always be viewed as a row.
            node.target = "reshape"
    traced.graph.lint()
    traced.recompile()
    return traced


class _Tracer(fx.Tracer):
    """Traces into every module except those that have a kernel."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, MixPool) or super().is_leaf_module(m, module_qualified_name)


def _replace(
    graph: fx.Graph, node: fx.Node, function: Callable[..., object], weights: Iterable[str], *settings: int
) -> None:
    """Replaces a module's call by a function of its input and weights."""
    with graph.inserting_before(node):
        held = [graph.get_attr(f"{node.target}.{name}") for name in weights]
        node.replace_all_uses_with(graph.call_function(function, (node.args[0], *held, *settings)))
    graph.erase_node(node)


def _is_simple_3x3(layer: nn.Conv2d) -> bool:
    shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups
    return shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and layer.bias is None and layer.padding_mode == "zeros"


def _is_simple_call(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether a layer is called on one input, without hooks or parametrizations."""
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return False
    layer = module.get_submodule(str(node.target))
    return not (layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "parametrizations"))


def _is_relu(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.ReLU
    return node.op in ("call_function", "call_method") and node.target in RELUS


def _norm_before(module: fx.GraphModule, relu: fx.Node) -> fx.Node | None:
    """Returns the GroupNorm whose only reader is this ReLU, if there is one."""
    norm = relu.args[0] if relu.args else None
    if not isinstance(norm, fx.Node) or not _is_simple_call(module, norm) or len(norm.users) > 1:
        return None
    layer = module.get_submodule(str(norm.target))
    return norm if type(layer) is nn.GroupNorm and layer.affine else None


def _fuse_norm(module: fx.GraphModule, norm: fx.Node, relu: fx.Node) -> None:
    graph, before = module.graph, norm.args[0]
    layer = module.get_submodule(str(norm.target))
    assert isinstance(before, fx.Node) and isinstance(layer, nn.GroupNorm)
    adds = before.op == "call_function" and before.target in SUMS and not before.kwargs
    adds = adds and all(isinstance(term, fx.Node) for term in before.args)
    # At the position of the sum, which others may read before the norm does.
    with graph.inserting_before(before if adds else norm):
        weight, bias = (graph.get_attr(f"{norm.target}.{name}") for name in ("weight", "bias"))
        if adds:
            both = graph.call_function(add_norm_relu, (*before.args, weight, bias, layer.num_groups, layer.eps))
            total, out = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
        else:
            out = graph.call_function(norm_relu, (before, weight, bias, layer.num_groups, layer.eps))
    relu.replace_all_uses_with(out)
    graph.erase_node(relu)
    graph.erase_node(norm)
    if adds:
        before.replace_all_uses_with(total)
        graph.erase_node(before)
