"""Constructor checks, all of the form `<module>: <argument> must <condition>, got <value>`."""

import math
from numbers import Integral, Real


def check_positive(owner: str, **sizes: int) -> None:
    """Every size must be an int of at least 1."""
    for name, size in sizes.items():
        if not _is_int(size) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive int, got {size!r}")


def check_top_k(owner: str, top_k: int, num_experts: int) -> None:
    """A token cannot choose more experts than there are."""
    if not _is_int(top_k) or not 1 <= top_k <= num_experts:
        raise ValueError(f"{owner}: top_k must be in [1, num_experts={num_experts}], got {top_k!r}")


def check_score_function(owner: str, score_function: str) -> None:
    """The name must be one that the router knows."""
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(
            f"{owner}: score_function must be 'softmax' or 'sigmoid', got {score_function!r}"
        )


def check_capacity_factor(owner: str, capacity_factor: float | None) -> None:
    """None (no limit), or a positive finite number."""
    if capacity_factor is None:
        return
    if not _is_number(capacity_factor) or not 0 < capacity_factor < math.inf:
        raise ValueError(
            f"{owner}: capacity_factor must be None or positive and finite, got {capacity_factor!r}"
        )


def check_coefficients(owner: str, **coefficients: float) -> None:
    """Loss coefficients must be finite and not negative."""
    for name, coefficient in coefficients.items():
        if not _is_number(coefficient) or not 0 <= coefficient < math.inf:
            raise ValueError(f"{owner}: {name} must be finite and >= 0, got {coefficient!r}")


# bool is an int to Python, but MoE(True, ...) is a slip. NumPy's integers are fine.
def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
