"""Who may attach: a pure decision over what the kernel says of the peer."""

from __future__ import annotations

from dataclasses import dataclass

LAST_ID = (1 << 32) - 2
"""The highest number of a user or group: the one behind it stands for none."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected process as the kernel saw it at connect time (SO_PEERCRED, SO_PEERGROUPS)."""

    pid: int
    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may attach besides root and `owner` (the daemon's uid): numbers of users and groups.

    `may_give` says whether this daemon can give files to those groups.
    """

    owner: int
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    may_give: bool = True

    @property
    def group(self) -> int | None:
        """The one group that folder and socket can be given to; None where modes cannot say it."""
        sayable = self.may_give and len(self.gids) == 1 and not self.uids
        return next(iter(self.gids)) if sayable else None

    @property
    def folder_mode(self) -> int:
        """Mode of the folder that holds the socket: as narrow as the policy allows."""
        if not self.uids and not self.gids:
            return 0o700
        return 0o711 if self.group is None else 0o750

    @property
    def socket_mode(self) -> int:
        """Mode of the socket; where it lets everyone connect, the peer check alone decides."""
        if not self.uids and not self.gids:
            return 0o600
        return 0o666 if self.group is None else 0o660


def is_no_id(text: str) -> bool:
    """Whether `text` is a number, but not of any user or group."""
    digits = text.lstrip("0")
    # Digits are counted first: Python does not read thousands of them.
    return text.isascii() and text.isdigit() and (len(digits) > 10 or int(text[-10:]) > LAST_ID)


def may_attach(policy: Policy, peer: Peer) -> bool:
    """Whether `peer` may ask this daemon anything at all."""
    return is_operator(policy, peer) or peer.uid in policy.uids or bool(policy.gids & peer.gids)


def is_operator(policy: Policy, peer: Peer) -> bool:
    """Whether `peer` may also release and load: root, and the user the daemon runs as."""
    return peer.uid in (0, policy.owner)
