"""A source that takes one token, and the one table of the tests."""

from preloadd.domain.endpoint import Endpoint
from preloadd.domain.tokens import token, verify
from preloadd.rank.seeding.listener import Listener
from preloadd.warmup.names import TableName
from preloadd.warmup.verdict import FIELDS

HERE = "127.0.0.1"
HASH = "ab" * 32
NAME = TableName(0, 3)
SECRET = "plt_a-secret-that-nobody-may-read-in-any-log"
METADATA = dict.fromkeys(FIELDS, "1.0")


class Source(Listener):
    """Where to find it, and the tokens that it takes."""

    def __init__(self, port, kinds):
        super().__init__(HERE, port, kinds, self._good)
        self.where = Endpoint(HERE, port)
        self.tokens = [a_token(SECRET)]

    async def _good(self, shown: bytes) -> bool:
        return verify(self.tokens, shown, 0.0) is not None


def a_token(secret):
    return token("n", secret, bytes(16), now=0.0, expires=None)
