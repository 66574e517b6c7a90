"""The output-length history over a restart: a small file beside the profiles of step times.

Without a history the first minutes of a server guess (`router.output_lengths`), and so would those
after each restart. So the router writes what it remembers every ten seconds while requests end, and
the next one begins with it. The file is one model's, and holds numbers of tokens alone: of all
requests together, and of each class those that name no user; no user, key, prompt or answer.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from lightserve.cost.profile import cache_dir, hash_of_model, write_whole
from lightserve.router.output_lengths import OutputLengths, RememberedLengths

log = logging.getLogger(__name__)

_VERSION = 1
SAVE_INTERVAL_S = 10.0
_MAX_BYTES = 4 << 20


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    model_hash: str
    remembered: RememberedLengths


class LengthFile:
    """One model's file. Calls belong to one thread; another one writes."""

    def __init__(self, model: Path) -> None:
        self._model_hash = hash_of_model(model)
        self.path = cache_dir() / f"lengths-{self._model_hash}.json"
        self._lengths: OutputLengths | None = None
        self._num_saved = 0
        """Lengths that had been recorded when it was last written, or read."""
        self._next_save_s = 0.0
        self._writer: threading.Thread | None = None

    def read(self) -> RememberedLengths | None:
        """Return what an earlier router has written; None, with a warning if it is no use."""
        try:
            with self.path.open("rb") as file:
                found = msgspec.json.decode(file.read(_MAX_BYTES + 1), type=_File)
            if found.schema_version != _VERSION:
                raise ValueError(f"schema version {found.schema_version}, not {_VERSION}")
            if found.model_hash != self._model_hash:
                raise ValueError(f"they are of the model {found.model_hash!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("output lengths in %s are ignored: %s", self.path, error)
            return None
        return found.remembered

    def keep(self, lengths: OutputLengths) -> None:
        """Say of which history `save` is."""
        self._lengths = lengths
        self._num_saved = lengths.num_recorded

    def save(self, now_s: float) -> None:
        """Have what is remembered written, if it is time, and requests have ended since."""
        lengths = self._lengths
        if lengths is None or now_s < self._next_save_s or self._is_writing:
            return
        if lengths.num_recorded == self._num_saved:
            return
        self._next_save_s = now_s + SAVE_INTERVAL_S
        self._num_saved = lengths.num_recorded
        content = _File(_VERSION, self._model_hash, lengths.remembered())
        # A disk may take its time, and the router must not.
        self._writer = threading.Thread(target=self._write, args=(content,), daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Return when what is being written is written."""
        if self._writer is not None:
            self._writer.join()

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write(self, content: _File) -> None:
        try:
            write_whole(self.path, msgspec.json.encode(content) + b"\n")
        except OSError as error:
            log.warning("output lengths are not kept: %s", error)
