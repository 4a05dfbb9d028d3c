"""What happens to a pass outside of what was measured: it is refused, or extrapolated, counted and warned of.

Law of this file: it is never answered in silence.
"""

from __future__ import annotations

import warnings
from typing import Literal

from minedraft.sim.steps import CostError

Outside = Literal["refuse", "flag"]


class ExtrapolationWarning(UserWarning):
    """A pass lies outside of what was measured and was extrapolated."""


class Fence:
    """The rule for one step model.

    Attributes:
        num_crossed: passes outside, which stays 0 where they are refused.

    Raises:
        ValueError: the rule isn't one.
    """

    __slots__ = ("_outside", "num_crossed")

    def __init__(self, outside: Outside = "refuse") -> None:
        if outside not in ("refuse", "flag"):
            raise ValueError(f"outside is {outside!r}, must be 'refuse' or 'flag'")
        self._outside = outside
        self.num_crossed = 0

    def cross(self, text: str) -> None:
        """Note that a pass lies outside.

        Args:
            text: what is outside of what, without a remedy.

        Raises:
            CostError: such passes are refused.
        """
        if self._outside == "refuse":
            raise CostError(f'{text}; measure more, keep steps smaller, or set outside = "flag"')
        self.num_crossed += 1
        if self.num_crossed == 1:
            warnings.warn(f"{text}; extrapolated, as others may be", ExtrapolationWarning, stacklevel=4)
