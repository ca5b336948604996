"""From a value to standard output, in the form that was asked for, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from preloadd.cli import render, render_data
from preloadd.cli.options import Form
from preloadd.cli.overview import Overview
from preloadd.cli.paper import UNBOUND, Paper
from preloadd.cli.render_data import Value
from preloadd.cli.watch import changes
from preloadd.cli.words import harmless
from preloadd.cli.world import World

V = TypeVar("V", bound=Value)

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_END_OF_LINE, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class Show:
    """Standard output as one command uses it."""

    world: World
    form: Form

    def once(self, value: V, draw: Callable[[V, Paper], str]) -> None:
        """Write the value; `draw` makes the table."""
        self.world.show(self._written(value, draw))

    def watch(self, moments: Iterable[Overview]) -> None:
        """Write all moments: in place on a terminal, else what changed. Ends when they do."""
        if self.form is Form.TABLE and self.world.on_terminal:
            self._in_place(moments)
        else:
            self._as_it_changes(moments)

    def _in_place(self, moments: Iterable[Overview]) -> None:
        last = ""
        self.world.show(_ENTER)
        try:
            for seen in moments:
                last = self._written(seen, render.overview)
                self.world.show(self._screen(last))
        finally:
            self.world.show(_LEAVE + last)

    def _as_it_changes(self, moments: Iterable[Overview]) -> None:
        before: Overview | None = None
        for seen in moments:
            lines = changes(before, seen) if before is not None else []
            if self.form is not Form.TABLE:
                if before is None or lines:
                    self.world.show(self._document(seen))
            elif before is None:
                self.world.show(render.overview(seen, self._paper()))
            else:
                now = time.strftime("%H:%M:%S")
                self.world.show("".join(f"{now} {harmless(line)}\n" for line in lines))
            before = seen

    def _screen(self, text: str) -> str:
        """`text` over what was there, cut to the height: a terminal that scrolls shows nonsense."""
        height = self.world.size[1]
        head = f"{time.strftime('%H:%M:%S')}  preloadctl status --watch, Ctrl-C ends it"
        lines = [head, "", *text.splitlines()]
        if len(lines) >= height:
            lines = [*lines[: height - 2], "..."]
        return _HOME + "".join(f"{line}{_TO_END_OF_LINE}\n" for line in lines) + _TO_END

    def _written(self, value: V, draw: Callable[[V, Paper], str]) -> str:
        match self.form:
            case Form.TABLE:
                return draw(value, self._paper())
            case Form.JSON:
                return render_data.as_json(value)
            case Form.YAML:
                return render_data.as_yaml(value)

    def _document(self, value: Value) -> str:
        """One of many: a line of JSON, or a YAML document."""
        if self.form is Form.JSON:
            return render_data.as_json(value, one_line=True)
        return render_data.as_yaml(value)

    def _paper(self) -> Paper:
        width = self.world.size[0] if self.world.out.isatty() else UNBOUND
        return Paper(width, self.world.color)
