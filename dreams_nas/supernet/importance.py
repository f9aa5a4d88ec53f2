"""Importance order: the widths that matter most come first, so that a ratio is a prefix.

The score of a key/value group (its query, key, value and output weights) or a feed-forward channel
(gate, up, down) is |sum of gradient x weight|, i.e. to first order how much the loss would change
without it (arXiv 1906.10771), summed over calibration batches; the magnitude is taken per batch,
because near a minimum signed sums over all batches cancel.

Shapes: K key/value groups, G query heads per group, E head size, I feed-forward channels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreams_nas.core.errors import UserError
from dreams_nas.supernet.supernet import Supernet

_HEAD_ROWS = ("q", "k", "v")
_FFN_ROWS = ("gate", "up")


@dataclass(frozen=True)
class LayerOrder:
    """Order of one layer, the most important first."""

    groups_K: Tensor
    """Key/value groups, int64."""
    channels_I: Tensor
    """Feed-forward channels, int64."""


@dataclass(frozen=True)
class LayerImportance:
    """Scores of one layer; higher matters more."""

    groups_K: Tensor
    channels_I: Tensor

    def order(self) -> LayerOrder:
        """Descending; ties keep their place, so that ordering twice changes nothing."""
        return LayerOrder(
            torch.argsort(self.groups_K, descending=True, stable=True),
            torch.argsort(self.channels_I, descending=True, stable=True),
        )


def measure_importance(supernet: Supernet, losses: Iterable[Tensor]) -> list[LayerImportance]:
    """Score every group and channel of every layer.

    Args:
        supernet: In its full width.
        losses: A scalar loss of the full draft per calibration batch, built one after the other so
            that only one graph is alive.

    Raises:
        UserError: No calibration batches.
    """
    parameters = [
        (layer, name, parameter)
        for layer, module in enumerate(supernet.body.layers)
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2
    ]
    scores: list[LayerImportance] | None = None
    for loss in losses:
        gradients = torch.autograd.grad(loss, [p for *_, p in parameters])
        products: list[dict[str, Tensor]] = [{} for _ in supernet.body.layers]
        for (layer, name, parameter), gradient in zip(parameters, gradients, strict=True):
            products[layer][name] = gradient * parameter.detach()
        found = [_reduce(product, supernet.dims.num_kv_heads) for product in products]
        if scores is None:
            scores = found
        else:
            scores = [
                LayerImportance(a.groups_K + b.groups_K, a.channels_I + b.channels_I)
                for a, b in zip(scores, found, strict=True)
            ]
    if scores is None:
        raise UserError("importance needs at least one calibration batch, got none")
    return scores


def _reduce(product: Mapping[str, Tensor], num_groups: int) -> LayerImportance:
    groups = [product[name].unflatten(0, (num_groups, -1)).sum(dim=(1, 2)) for name in _HEAD_ROWS]
    groups.append(product["o"].unflatten(1, (num_groups, -1)).sum(dim=(0, 2)))
    channels = [product[name].sum(dim=1) for name in _FFN_ROWS]
    channels.append(product["down"].sum(dim=0))
    return LayerImportance(torch.stack(groups).sum(0).abs(), torch.stack(channels).sum(0).abs())


@torch.no_grad()
def apply_order(
    supernet: Supernet,
    orders: Iterable[LayerOrder],
    optimizer: torch.optim.Optimizer | None = None,
    averages: Mapping[str, Tensor] | None = None,
) -> None:
    """Permute groups and channels in place; the full draft computes the same as before.

    Args:
        supernet: Whose weights are permuted.
        orders: One per layer.
        optimizer: Its moments move with the weights.
        averages: Averaged weights by parameter name of the supernet, where there are any; they
            move too.
    """
    for index, (layer, order) in enumerate(zip(supernet.body.layers, orders, strict=True)):
        assert isinstance(layer, nn.Module)
        for name, parameter in layer.named_parameters():
            tensors = [parameter.data]
            if optimizer is not None:
                state = optimizer.state.get(parameter, {})
                tensors += [t for t in state.values() if getattr(t, "shape", ()) == parameter.shape]
            if averages:
                tensors.append(averages[f"body.layers.{index}.{name}"])
            for tensor in tensors:
                tensor.copy_(_permuted(tensor, name, order))


def _permuted(tensor: Tensor, name: str, order: LayerOrder) -> Tensor:
    if name in _HEAD_ROWS:
        rows_KRD: Tensor = tensor.unflatten(0, (len(order.groups_K), -1))
        return rows_KRD[order.groups_K].flatten(0, 1)
    if name == "o":
        columns_DKC: Tensor = tensor.unflatten(1, (len(order.groups_K), -1))
        return columns_DKC[:, order.groups_K].flatten(1, 2)
    if name in _FFN_ROWS:
        return tensor[order.channels_I]
    if name == "down":
        return tensor[:, order.channels_I]
    return tensor
