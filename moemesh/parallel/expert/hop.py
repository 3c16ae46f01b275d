"""One exchange of token rows along one axis, forward and back: a building block of dispatchers.

Legend: T own rows, P ranks of the axis, S rows sent, N rows received, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, all_to_all_start
from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, permute, unpermute


@dataclass(frozen=True, kw_only=True)
class Hop:
    """`rows` maps the S rows sent (ordered by destination) to the T own rows that they copy."""

    axis: Axis
    rows: RowMap
    input_splits: list[int]
    output_splits: list[int]

    def send(self, x_TH: Tensor, caller: str, codec: Codec | None = None) -> Pending[Tensor]:
        """Own rows [T, H] -> received rows [N, H], by source. Backward: the sums return."""
        return all_to_all_start(
            permute(x_TH, self.rows),
            self.axis,
            self.input_splits,
            self.output_splits,
            caller=caller,
            codec=codec,
        )

    def send_back(self, y_NH: Tensor, caller: str) -> Pending[Tensor]:
        """Results [N, H] -> their sum per own row [T, H]. Backward: as :meth:`send`."""
        sent = all_to_all_start(
            y_NH, self.axis, self.output_splits, self.input_splits, caller=caller
        )
        return sent.then(lambda y_SH: unpermute(y_SH, self.rows))
