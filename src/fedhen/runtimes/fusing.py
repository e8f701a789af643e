"""Rewrites a module for the GPU: GroupNorm with the ReLU behind it, and the sum before it, become one kernel."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn import functional

from fedhen.runtimes.kernels import add_norm_relu, norm_relu

RELUS = (torch.relu, functional.relu, "relu")
SUMS = (operator.add, operator.iadd, torch.add)


def fused(module: nn.Module) -> nn.Module:
    """The same module, with the same weights, in fewer passes over memory; itself where it cannot be traced."""
    try:
        traced = fx.symbolic_trace(module)
    except Exception:  # Any module may refuse in its own way; it is then taken as it is.
        return module
    for node in list(traced.graph.nodes):
        if _is_relu(traced, node) and (norm := _norm_before(traced, node)) is not None:
            _rewrite(traced, norm, node)
    traced.graph.lint()
    traced.recompile()
    return traced


def _is_relu(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.ReLU
    return node.op in ("call_function", "call_method") and node.target in RELUS


def _norm_before(module: fx.GraphModule, relu: fx.Node) -> fx.Node | None:
    """The GroupNorm whose only reader is this ReLU."""
    norm = relu.args[0] if relu.args else None
    if not isinstance(norm, fx.Node) or norm.op != "call_module" or len(norm.users) > 1:
        return None
    layer = module.get_submodule(str(norm.target))
    return norm if type(layer) is nn.GroupNorm and layer.affine else None


def _rewrite(module: fx.GraphModule, norm: fx.Node, relu: fx.Node) -> None:
    graph, before = module.graph, norm.args[0]
    layer = module.get_submodule(str(norm.target))
    assert isinstance(before, fx.Node) and isinstance(layer, nn.GroupNorm)
    adds = before.op == "call_function" and before.target in SUMS and not before.kwargs
    adds = adds and all(isinstance(term, fx.Node) for term in before.args)
    # At the sum's own place: others may read it before the norm does.
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
