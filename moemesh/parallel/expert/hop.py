"""One exchange of token rows along one axis, there and back: what dispatchers are made of.

Legend: T own rows, P ranks of the axis, S rows sent, N rows received, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moemesh.comm import collectives
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, all_to_all_start
from moemesh.ops.pending import Pending
from moemesh.ops.permute import RowMap, map_from_sources, permute, unpermute


@dataclass(frozen=True, kw_only=True)
class Hop:
    """`rows` maps the S rows sent (ordered by destination) to the T own rows that they copy."""

    axis: Axis
    rows: RowMap
    input_splits: list[int]
    output_splits: list[int]

    def send(self, x_TH: Tensor, caller: str, codec: Codec | None = None) -> Pending[Tensor]:
        """Own rows [T, H] -> received rows [N, H], by source. Backward: sums come home."""
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


def hop_by_visits(visits_TP: Tensor, axis: Axis, *, caller: str) -> Hop:
    """The hop that sends own row t once to every rank p with ``visits_TP[t, p]``.

    Exchanges one count per pair of ranks; rows for a rank ascend by t.
    """
    _, sources_S = visits_TP.t().nonzero(as_tuple=True)
    sent_P = visits_TP.sum(0)
    received_P = collectives.exchange_counts(sent_P, axis, caller=caller)
    splits = torch.stack([sent_P, received_P]).tolist()
    return Hop(
        axis=axis,
        rows=map_from_sources(sources_S, len(visits_TP)),
        input_splits=splits[0],
        output_splits=splits[1],
    )
