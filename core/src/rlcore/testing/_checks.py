"""How the conformance kits of the objective draw batches and compare numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlcore.testing._rows import Row, random_rows
from rlcore.types import Max, Mean, Min, Stat

__all__ = ["close", "for_many_batches", "refused", "require_detached", "require_same_stats"]


def close(found: float, wanted: float, what: str, *, relative: float = 1e-5, absolute: float = 1e-7) -> None:
    """Fail unless equal within 1e-5 relative or 1e-7 absolute."""
    assert math.isclose(found, wanted, rel_tol=relative, abs_tol=absolute), f"{what}: got {found!r}, wanted {wanted!r}"


def for_many_batches(check: Callable[[list[Row], int], None], *, one_in: int = 1, **options: Any) -> None:
    """Run ``check(rows, seed)`` on many random ragged batches, and shrink to a small one that fails.

    As many as the hypothesis profile says, 100 by default, or ``one_in`` so many of them.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    @settings(
        max_examples=-(-settings().max_examples // one_in),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(
        lengths=st.lists(st.integers(0, 12), max_size=6),
        scale=st.sampled_from([0.0, 0.02, 0.3, 2.0, 30.0]),
        seed=st.integers(0, 2**32 - 1),
    )
    def run(lengths: list[int], scale: float, seed: int) -> None:
        check(random_rows(seed, lengths, scale, **options), seed)

    run()


def require_detached(values: Mapping[str, Any]) -> None:
    """Fail if a tensor, or one inside a measurement, carries a gradient."""
    for name, value in values.items():
        parts: Iterable[Any] = (value,)
        if isinstance(value, Mean):
            parts = (value.total, value.count)
        elif isinstance(value, Max | Min):
            parts = (value.of,)
        for part in parts:
            assert not getattr(part, "requires_grad", False), f"{name} carries a gradient: detach it"


def require_same_stats(parts: Iterable[Mapping[str, Stat]], whole: Mapping[str, Stat], what: str) -> None:
    """Fail unless the measurements of the parts merge to those of the whole."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, stat in part.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    assert set(merged) == set(whole), f"{what}: measurements differ: {sorted(set(merged) ^ set(whole))}"
    for name, stat in whole.items():
        found, wanted = merged[name].value(), stat.value()
        if found is None or wanted is None:
            assert found == wanted, f"{what}: {name}: got {found}, wanted {wanted}"
        else:
            assert math.isfinite(wanted), f"{what}: {name} is {wanted}"
            close(found, wanted, f"{what}: {name}")


def refused(what: str, action: Callable[[], Any], *named: str) -> None:
    """Fail unless ``action`` raises an error whose message names everything in ``named``."""
    try:
        action()
    except Exception as error:
        text = str(error)
        if missing := [name for name in named if name not in text]:
            raise AssertionError(f"{what}: the error does not name {', '.join(missing)}: {text!r}") from error
    else:
        raise AssertionError(f"{what} was accepted")
