"""What a rank hears from its loader, without any I/O: collects chunks and manifest of one load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from preloadd.domain.manifest import MAX_CHUNKS
from preloadd.errors import ProtocolViolation
from preloadd.protocol import codec, payload
from preloadd.protocol.messages import (
    ChunkFilled,
    Failed,
    Identified,
    LoaderReport,
    ManifestWritten,
    Progress,
    Tuned,
    Warmable,
)

H = TypeVar("H")


class LoadPhase(StrEnum):
    """LOADING until the manifest came (COMPLETE) or the load cannot succeed any more (FAILED)."""

    LOADING = "loading"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Load(Generic[H]):
    """The handles of a complete load; chunks are (handle, bytes) in order. None is sealed yet."""

    manifest: H
    manifest_nbytes: int
    chunks: tuple[tuple[H, int], ...]


class LoadReceiver(Generic[H]):
    """Takes every handle it is given, and keeps it until `take` or `release` hands it back.

    A loader that has to wait (`waits`) may fill nothing before it is let `proceed`. What it
    says of tables comes once, after the manifest: `warmable` and, where it `tunes`, `tuned`.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.phase = LoadPhase.LOADING
        self.failure: Failed | None = None
        self.warmable: Warmable | None = None
        self.tuned: Tuned | None = None
        self.tunes = False
        self._identified = False
        self._waits = waits
        self._may_fill = not waits
        self._chunks: list[tuple[H, int]] = []
        self._manifest: tuple[H, int] | None = None
        self._spoiled: list[H] = []

    def receive(self, data: bytes, handles: Sequence[H] = ()) -> LoaderReport:
        """The report in one packet. ProtocolViolation fails the load; no handle is lost by it.

        After the manifest only what is of a warm-up and a late failure are acceptable.
        """
        try:
            report = self._checked(data, len(handles))
        except ProtocolViolation:
            self._spoiled.extend(handles)
            self.phase = LoadPhase.FAILED
            raise
        self._keep(report, handles)
        return report

    def proceed(self) -> None:
        """The loader is told to go on."""
        self._may_fill = True

    def tune(self, *, wanted: bool) -> None:
        """The loader is told whether to tune."""
        self.tunes = wanted

    def receive_eof(self) -> None:
        """The loader is gone; without a manifest the load has failed."""
        if self.phase is LoadPhase.LOADING:
            self.phase = LoadPhase.FAILED

    def take(self) -> Load[H]:
        """The complete load, whose handles are the caller's from now on; ValueError before that."""
        if self.phase is not LoadPhase.COMPLETE or self._manifest is None:
            raise ValueError(f"there is nothing to take: the load is {self.phase}")
        manifest, nbytes = self._manifest
        load = Load(manifest, nbytes, tuple(self._chunks))
        self._manifest, self._chunks = None, []
        return load

    def release(self) -> tuple[H, ...]:
        """Every handle still kept, for the caller to close. A load given up this way has failed."""
        kept = [handle for handle, _ in self._chunks] + self._spoiled
        if self._manifest is not None:
            kept.append(self._manifest[0])
            self.phase = LoadPhase.FAILED
        self.receive_eof()
        self._manifest, self._chunks, self._spoiled = None, [], []
        return tuple(kept)

    def _checked(self, data: bytes, handles: int) -> LoaderReport:
        report = codec.decode_report(data)
        fault = self._fault(report, handles)
        if fault:
            raise ProtocolViolation(f"the loader's {codec.tag(report)}: {fault}")
        return report

    def _fault(self, report: LoaderReport, handles: int) -> str | None:
        due = 1 if isinstance(report, (ChunkFilled, ManifestWritten)) else 0
        if handles != due:
            return f"descriptors: {handles} instead of {due}"
        if self.phase is LoadPhase.FAILED:
            return "the load has failed already"
        match report:
            case Progress():
                return None if min(report.done, report.total) >= 0 else "negative bytes"
            case ChunkFilled():
                return self._chunk_fault(report)
            case ManifestWritten():
                return self._manifest_fault(report)
            case Identified():
                return self._identified_fault()
            case Warmable() | Tuned():
                return self._warm_fault(report)
            case Failed():
                return None

    def _identified_fault(self) -> str | None:
        if not self._waits:
            return "nobody waits for it: this rank meets no others, and replaces nothing"
        again = self._identified or self._chunks or self.phase is LoadPhase.COMPLETE
        return "it comes once, before all chunks" if again else None

    def _warm_fault(self, report: Warmable | Tuned) -> str | None:
        if isinstance(report, Tuned):
            due = self.tunes and self.tuned is None
            return None if due else "it comes once, from a loader that was told to tune"
        due = self.phase is LoadPhase.COMPLETE and self.warmable is None
        return None if due else "it comes once, after the manifest"

    def _chunk_fault(self, chunk: ChunkFilled) -> str | None:
        if self.phase is LoadPhase.COMPLETE:
            return "the manifest came before it"
        if not self._may_fill:
            return "nobody has let the loader proceed"
        if chunk.index != len(self._chunks) or chunk.index >= MAX_CHUNKS:
            return f"index {chunk.index} after {len(self._chunks)} chunks of at most {MAX_CHUNKS}"
        return None if chunk.nbytes > 0 else f"{chunk.nbytes} bytes"

    def _manifest_fault(self, manifest: ManifestWritten) -> str | None:
        if self.phase is LoadPhase.COMPLETE or not self._chunks:
            return f"a manifest after {len(self._chunks)} chunks, phase {self.phase}"
        good = 0 < manifest.nbytes <= payload.MAX_NBYTES
        return None if good else f"{manifest.nbytes} bytes; at most {payload.MAX_NBYTES:,}"

    def _keep(self, report: LoaderReport, handles: Sequence[H]) -> None:
        match report:
            case ChunkFilled():
                self._chunks.append((handles[0], report.nbytes))
            case ManifestWritten():
                self._manifest, self.phase = (handles[0], report.nbytes), LoadPhase.COMPLETE
            case Failed():
                self.failure, self.phase = report, LoadPhase.FAILED
            case Identified():
                self._identified = True
            case Warmable():
                self.warmable = report
            case Tuned():
                self.tuned = report
            case Progress():
                pass
