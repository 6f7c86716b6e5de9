"""The Gantt chart's data: columns of little numbers, since a long run has very many bars."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from pipeline.report.data import ReportData
from pipeline.report.idle import in_order, windows


def bars(data: ReportData) -> dict[str, Any] | None:
    """Lanes, and the pieces of all of them in order of lane and start; None without any.

    Columns are little-endian, in base64: ``start`` (float64, seconds since ``origin``), ``length``
    (float32, seconds), ``iteration`` (uint32, from 1; 0 for stages of none), ``kind`` (uint8: twice
    the stage's number, and 1 where it only waits). ``first`` has each lane's first row, and the
    number of rows. ``windows`` are iteration, start and end of iterations, in seconds.
    """
    if not data.pieces:
        return None
    lanes = in_order(piece.lane for piece in data.pieces)
    stages = list(data.colours)
    row, number = {lane: i for i, lane in enumerate(lanes)}, {s: i for i, s in enumerate(stages)}
    pieces = sorted(data.pieces, key=lambda piece: (row[piece.lane], piece.start))
    origin = min(piece.start for piece in pieces)
    first = np.searchsorted([row[piece.lane] for piece in pieces], np.arange(len(lanes) + 1))
    return {
        "stages": stages,
        "lanes": lanes,
        "origin": origin,
        "first": first.tolist(),
        "start": _packed((piece.start - origin for piece in pieces), "<f8"),
        "length": _packed((piece.seconds for piece in pieces), "<f4"),
        "iteration": _packed(
            (piece.iteration + 1 if piece.stage in data.stage_names else 0 for piece in pieces),
            "<u4",
        ),
        "kind": _packed((2 * number[p.stage] + (not p.computes) for p in pieces), "|u1"),
        "windows": [
            [i + 1, round(start - origin, 3), round(end - origin, 3)]
            for i, (start, end) in windows(data.spans).items()
        ],
    }


def _packed(values: Any, dtype: str) -> str:
    return base64.b64encode(np.array(list(values), dtype=dtype).tobytes()).decode()
