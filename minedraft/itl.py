"""Inter-token latencies: the gaps between the chunks of each request, one by one (`GapList`)."""

from __future__ import annotations

import numpy as np

from minedraft.run_data import Bools, Floats, Ints


class GapList:
    """Every gap, in eight bytes: seconds as float32 (relative error 6e-8) and the row of its request."""

    def __init__(self) -> None:
        self._gaps: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
        self._owners: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, gaps_s: Floats, owners: Ints) -> None:
        """Take gaps in seconds, and for each the row of its request."""
        self._gaps.append(gaps_s.astype(np.float32))
        self._owners.append(owners.astype(np.int32))
        self._num += len(gaps_s)

    def of(self, wanted: Bools) -> Floats:
        """The gaps of the requests whose rows are wanted, in seconds."""
        if not self._gaps:
            return np.empty(0)
        # Part by part: there may be millions.
        parts = [gaps[wanted[owners]] for gaps, owners in zip(self._gaps, self._owners, strict=True)]
        return np.concatenate(parts).astype(np.float64)

    def keep(self, new_rows: Ints) -> None:
        """Forget requests and number the others anew.

        Args:
            new_rows: the new row by the old one; 0 where a request is to be forgotten.
        """
        gaps, owners = self._columns()
        owners = new_rows[owners]
        kept = owners > 0
        self._gaps, self._owners, self._num = [], [], 0
        self.add(gaps[kept], owners[kept])

    def per_request(self, num_requests: int) -> list[list[float]]:
        """The gaps of each row in order, in seconds: `itls` of `--save-detailed`."""
        gaps, owners = self._columns()
        order = np.argsort(owners, kind="stable")
        ends = np.bincount(owners, minlength=num_requests).cumsum()
        return [part.tolist() for part in np.split(gaps[order], ends[:-1])]

    def _columns(self) -> tuple[Floats, Ints]:
        if not self._gaps:
            return np.empty(0), np.empty(0, dtype=np.int64)
        return np.concatenate(self._gaps).astype(np.float64), np.concatenate(self._owners).astype(np.int64)
