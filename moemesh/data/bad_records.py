"""Records that cannot be read: the run ends at the first, or leaves out a bounded share of them."""

from __future__ import annotations

from moemesh.config.data import BadRecords
from moemesh.data.records import BadRecordError
from moemesh.data.tokenizer import DataError

#: Places of bad records that a message names.
NAMED = 5
#: Records after which a share that is too large ends the reading.
ENOUGH = 1000


class BadRecordLog:
    """Counts the records of one source, `total`, and the bad among them; `places` are the first of
    these, in words."""

    def __init__(self, policy: BadRecords = "fail", share: float = 0.0, source: str = "") -> None:
        """With "skip", at most `share` of the records may be bad."""
        self._policy, self._share, self._source = policy, share, source
        self.total = self.bad = 0
        self.places: list[str] = []

    def unreadable(self, error: BadRecordError) -> None:
        """One that a file's format does not make a record, not in `total` yet; see :meth:`add`."""
        self.total += 1
        self.add(error)

    def add(self, error: BadRecordError) -> None:
        """One that is bad: raises it with the policy "fail", or DataError for one too many."""
        if self._policy == "fail":
            raise error
        self.bad += 1
        if len(self.places) < NAMED:
            self.places.append(str(error))
        if self.total >= ENOUGH:
            self.check()

    def check(self) -> None:
        """Raises DataError when the share of bad records is too large."""
        if self.bad > self._share * self.total:
            raise DataError(
                f"{self._source}: {self.bad} of {self.total} records are bad, more than the "
                f"share data.bad_record_share = {self._share:g} that may be left out: "
                f"{'; '.join(self.places)}"
            )

    def note(self) -> str | None:
        """A sentence for the user; None without bad records."""
        if not self.bad:
            return None
        return (
            f"{self._source}: {self.bad} of {self.total} records are bad and left out "
            f'(data.bad_records = "skip"): {"; ".join(self.places)}'
            + (", ..." if self.bad > len(self.places) else "")
        )
