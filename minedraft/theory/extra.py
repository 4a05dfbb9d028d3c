"""The functions of scipy that this package needs, imported when they are called: it is an extra."""

from __future__ import annotations

from collections.abc import Callable

REMEDY = "install it with: pip install 'minedraft[theory]'"


class MissingTheoryExtraError(ImportError):
    """scipy isn't there; the message says how to get it."""

    def __init__(self) -> None:
        super().__init__(f"this needs the theory extra (scipy is missing); {REMEDY}")


def lambert_w_minus_1(z: float) -> float:
    """W_{-1}(z), the lower real branch of w e^w = z, for -1/e <= z < 0; at most -1.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    try:
        from scipy.special import lambertw
    except ImportError as error:
        raise MissingTheoryExtraError from error
    return float(lambertw(z, -1).real)


def brentq(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a continuous function between two points at which its signs differ.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    try:
        from scipy import optimize
    except ImportError as error:
        raise MissingTheoryExtraError from error
    return float(optimize.brentq(function, low, high, xtol=1e-13, rtol=1e-13))


def student_t_quantile(degrees: int, share: float) -> float:
    """The point below which Student's t with so many degrees of freedom lies with this chance.

    Raises:
        MissingTheoryExtraError: scipy isn't there.
    """
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise MissingTheoryExtraError from error
    return float(stdtrit(degrees, share))
