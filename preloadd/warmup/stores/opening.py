"""Stores by their names, as settings have them: `file:/srv/cache`, `mooncake`, or somebody else's.

Whatever cannot work as it is configured is said at once; what merely does not answer is not waited
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial

from preloadd.domain.lines import one_line
from preloadd.errors import ConfigError, PreloadError
from preloadd.warmup.stores import file, mooncake_store
from preloadd.warmup.stores.api import DEADLINE_S, Store
from preloadd.warmup.stores.chain import Stores
from preloadd.warmup.stores.worker import Worker


def open_stores(
    names: Sequence[str],
    environ: Mapping[str, str],
    *,
    python: str = "",
    deadline: float = DEADLINE_S,
) -> Stores:
    """The stores of these names, in that order; the caller owns them.

    ConfigError with one line for each that is no store or cannot be used as it is configured. That
    takes up to `deadline` seconds. `python` is the interpreter of the engine, in which Mooncake
    is looked for ('': this one); `environ` must have it find this package.
    """
    with ExitStack() as undo:
        workers, faults = [], []
        for name in names:
            try:
                make = _maker(name, names, environ, python)
                workers.append(undo.enter_context(Worker(name, make, deadline)))
            except PreloadError as error:
                faults.append(f"{one_line(name)}: {error}")
        faults += _unopened(workers)
        if faults:
            raise ConfigError("\n".join(faults))
        undo.pop_all()
    return Stores(workers)


def _unopened(workers: Iterable[Worker]) -> Iterator[str]:
    for worker in workers:
        try:
            worker.opened()
        except (PreloadError, OSError) as error:
            yield f"{one_line(worker.name)}: {one_line(error)}"


def _maker(
    name: str, names: Sequence[str], environ: Mapping[str, str], python: str
) -> Callable[[], Store]:
    """What makes the store; ConfigError if there is none of that name."""
    if names.count(name) > 1:
        raise ConfigError("it is there twice: write it once")
    kind, _, rest = name.partition(":")
    if kind == file.KIND:
        return partial(file.open_file, rest, environ)
    if kind == mooncake_store.KIND:
        return partial(mooncake_store.open_mooncake, rest, environ, python=python)
    # Not above: most ranks need none of it, and it takes long to import.
    from preloadd.warmup.stores.foreign import installed, open_foreign

    found = installed()
    if kind in found:
        return partial(open_foreign, found[kind], rest, environ)
    raise _unknown(name, kind, [file.KIND, mooncake_store.KIND, *sorted(found)])


def _unknown(name: str, kind: str, known: Sequence[str]) -> ConfigError:
    if name.startswith("/"):
        return ConfigError(f"this is no store: did you mean {file.KIND}:{one_line(name)}?")
    near = get_close_matches(kind.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"there is no store {kind!r}: {hint}")
