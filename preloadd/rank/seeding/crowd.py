"""Who has connected and not shown a good token yet, and who has to leave for whom. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

MOST = 512
MOST_EACH = 64
"""Connections of one address: so many, however slowly they come, cannot push out all others'."""

_OWN_NETWORK = 64


@dataclass(slots=True)
class _Guest:
    address: str
    asked: bool = False


class Crowd:
    """Guests by their numbers, in the order in which they came; `most` at a time."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._guests: dict[int, _Guest] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def arrived(self, number: int, address: str) -> int | None:
        """Somebody came; the number of who has to leave for it, if somebody has to.

        That is one of its own address if there are too many of those, else one of whichever has
        most. The first to go is who has waited longest without asking: an honest peer asks at once.
        """
        leaving = None
        if self._count(address) >= MOST_EACH:
            leaving = self._first_of(address)
        elif len(self._guests) >= self._most:
            leaving = self._first_of(self._most_frequent())
        if leaving is not None:
            del self._guests[leaving]
        self._guests[number] = _Guest(address)
        return leaving

    def asked(self, number: int) -> None:
        """That one has said all it is to say."""
        if (guest := self._guests.get(number)) is not None:
            guest.asked = True

    def left(self, number: int) -> None:
        """That one is gone, or no stranger any more."""
        self._guests.pop(number, None)

    def _count(self, address: str) -> int:
        return sum(1 for _ in self._of(address))

    def _of(self, address: str) -> Iterator[int]:
        return (number for number, guest in self._guests.items() if guest.address == address)

    def _first_of(self, address: str) -> int:
        # Stable: the oldest of those who have not asked, else the oldest of all.
        return min(self._of(address), key=lambda number: self._guests[number].asked)

    def _most_frequent(self) -> str:
        counts: dict[str, int] = {}
        for guest in self._guests.values():
            counts[guest.address] = counts.get(guest.address, 0) + 1
        return max(counts, key=lambda address: counts[address])


def most_of(files: int) -> int:
    """How many guests a process may have that may open so many files: the rest is for its work."""
    return max(min(MOST, files // 4), 1)


def of_one_peer(host: str) -> str:
    """What all addresses that one peer may have in common: of IPv6, it has a whole network."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        return str(IPv6Address(int(address) >> _OWN_NETWORK << _OWN_NETWORK))
    return host
