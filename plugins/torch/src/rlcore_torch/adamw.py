"""AdamW on float32 masters of a module that computes in another dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["MasterAdamW"]

Tensor = torch.Tensor

_CHUNK = 1 << 20
"""Elements that are updated at a time: few enough to stay in the cache, enough for every thread."""


class MasterAdamW:
    """Float32 masters, AdamW moments, and gradients that are summed in float32.

    A parameter that computes in float32 is its own master. Gradients are sums over the batch; :meth:`step` divides them
    once. Source: Loshchilov and Hutter 2019.

    Args:
        parameters: by name, without duplicates; values are the float32 initial weights.
        dtypes: what each parameter computes in; its data is replaced by a copy of that dtype.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        dtypes: Mapping[str, torch.dtype],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.parameters = dict(parameters)
        self.masters = {name: p.data for name, p in self.parameters.items()}
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.updates = 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if dtypes[name] != torch.float32:
                parameter.data = parameter.data.to(dtypes[name])
        self._scratch = torch.empty(_CHUNK, device=next(iter(self.masters.values())).device)

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to float32 sums, before the next micro-batch; not needed for the last."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self._sums:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

    def grad_norm(self) -> float:
        """The norm of the summed gradients."""
        if self._sums:
            self.accumulate()
        norms = [torch.linalg.vector_norm(gradient) for *_, gradient in self._gradients()]
        return float(torch.stack(norms).double().norm()) if norms else 0.0

    def step(self, lr: float, scale: float) -> None:
        """One update with ``scale`` times the summed gradients; afterwards there are none."""
        self.updates += 1
        count = torch.tensor(float(self.updates), device=self._scratch.device)
        for name, part, gradient in self._gradients():
            gradient.mul_(scale)
            parameter, master = self.parameters[name], self.masters[name].view(-1)[part]
            first, second = (moment.view(-1)[part] for moment in self._moments(name))
            torch._fused_adamw_(  # the kernel of torch.optim.AdamW(fused=True), on a slice
                [master],
                [gradient],
                [first],
                [second],
                [],
                [count],
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay if parameter.ndim > 1 else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            if parameter.dtype != torch.float32:
                parameter.data.view(-1)[part].copy_(master)
        self.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The moments, as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``."""
        return {
            f"{kind}.{name}": moment
            for name, pair in self.moments.items()
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), pair, strict=True)
        }

    def load(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int) -> None:
        """Continue from :attr:`masters`, :meth:`state_dict` and :attr:`updates` of another instance."""
        self.clear()
        self.updates = updates
        self.moments.clear()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.masters[name].copy_(masters[name])
                parameter.data.copy_(self.masters[name])
                if f"exp_avg.{name}" in moments:
                    for moment, kind in zip(self._moments(name), ("exp_avg", "exp_avg_sq"), strict=True):
                        moment.copy_(moments[f"{kind}.{name}"])

    def _moments(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self.moments:
            master = self.masters[name]
            self.moments[name] = (torch.zeros_like(master), torch.zeros_like(master))
        return self.moments[name]

    def _gradients(self) -> Iterator[tuple[str, slice, Tensor]]:
        """Name, slice of the flat parameter and its gradient as a float32 scratch that may be changed."""
        for name, parameter in self.parameters.items():
            gradient: Any = self._sums.get(name, parameter.grad)
            if gradient is None:
                continue
            flat = gradient.reshape(-1)
            for start in range(0, flat.numel(), _CHUNK):
                piece = flat[start : start + _CHUNK]
                yield name, slice(start, start + piece.numel()), self._scratch[: piece.numel()].copy_(piece)
