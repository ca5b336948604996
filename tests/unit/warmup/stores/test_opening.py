"""Names of stores, right and wrong; a further store is really installed, as a package would be."""

import sys
import time
from textwrap import dedent

import pytest

from preloadd.errors import ConfigError
from preloadd.warmup.stores.opening import open_stores


def refused(*names, environ=None, **more):
    with pytest.raises(ConfigError) as told:
        open_stores(names, environ or {}, **more)
    return str(told.value).splitlines()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function: a distribution with these entry points and this module `shelf_of_others`."""

    def install(entries, module):
        folder = tmp_path / "site"
        info = folder / "shelf-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[preloadd.warmup_stores]\n{entries}\n")
        (folder / "shelf_of_others.py").write_text(dedent(module))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "shelf_of_others", raising=False)

    yield install
    sys.modules.pop("shelf_of_others", None)


SHELF = """
    class Shelf:
        values = {}

        def __init__(self, rest, environ):
            self.name = f"shelf:{rest}"
            self.prefix = environ["PREFIX"]

        def find(self, key, limit):
            return self.values.get(self.prefix + key)

        def keep(self, key, value):
            self.values.setdefault(self.prefix + key, value)

        def close(self):
            self.values["closed"] = self.name
"""


def test_in_the_order_in_which_they_are_named(tmp_path):
    names = []
    for folder in ("b", "a"):
        (tmp_path / folder).mkdir()
        names.append(f"file:{tmp_path / folder}")
    with open_stores(names, {}) as stores:
        assert stores.names == tuple(names)
        stores.keep("k", b"v")
    assert [(tmp_path / folder / "k").read_bytes() for folder in "ab"] == [b"v", b"v"]


def test_none():
    with open_stores((), {}) as stores:
        assert stores.names == ()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("moncake", "there is no store 'moncake': did you mean 'mooncake'?"),
        ("Mooncake", "there is no store 'Mooncake': did you mean 'mooncake'?"),
        ("fil:/srv", "there is no store 'fil': did you mean 'file'?"),
        ("/srv/cache", "this is no store: did you mean file:/srv/cache?"),
        ("s3://b", "there is no store 's3': known are file, mooncake"),
        ("", "there is no store '': known are file, mooncake"),
        ("a\nb", "there is no store 'a\\nb': known are file, mooncake"),
    ],
)
def test_misspelled_names(name, told):
    (line,) = refused(name)
    assert line.endswith(f": {told}")


def test_all_faults_are_told_at_once(tmp_path):
    lines = refused("file", "moncake", "mooncake", f"file:{tmp_path}", f"file:{tmp_path}/none")
    assert [line.split(":")[0] for line in lines] == ["moncake", "file", "mooncake", "file"]
    assert "MOONCAKE_CONFIG_PATH is not set" in lines[2]


def test_one_name_twice(tmp_path):
    name = f"file:{tmp_path}"
    assert refused(name, name) == [f"{name}: it is there twice: write it once"] * 2


def test_the_library_has_to_be_there_for_the_engines_python(pool):
    (line,) = refused("mooncake", environ=pool.environ, python="/none/python")
    assert line == "mooncake: /none/python cannot be started: name another Python"


def test_one_of_another_package(installed):
    installed("shelf = shelf_of_others:Shelf", SHELF)
    with open_stores(["shelf:x"], {"PREFIX": "p-"}) as stores:
        assert stores.names == ("shelf:x",)
        stores.keep("k", b"v")
        assert stores.find("k") == b"v"
    import shelf_of_others

    assert shelf_of_others.Shelf.values == {"p-k": b"v", "closed": "shelf:x"}


def test_names_of_other_packages_are_known(installed):
    installed("shelf = shelf_of_others:Shelf", SHELF)
    assert refused("self") == ["self: there is no store 'self': did you mean 'shelf'?"]
    assert refused("q")[0].endswith("known are file, mooncake, shelf")


def test_no_package_takes_the_name_of_another_store(installed, tmp_path):
    installed("file = shelf_of_others:Shelf", SHELF)
    with open_stores([f"file:{tmp_path}"], {}) as stores:
        stores.keep("k", b"v")
    assert (tmp_path / "k").read_bytes() == b"v"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import no_such_module", "cannot be loaded (No module named 'no_such_module'): repair"),
        ("", "has no attribute 'Shelf'): repair or remove that package"),
        ("def Shelf(*_): raise KeyError('x')", "it failed: KeyError: 'x'"),
    ],
)
def test_packages_that_do_not_work(installed, module, told):
    installed("shelf = shelf_of_others:Shelf", module)
    (line,) = refused("shelf")
    assert line.startswith("shelf: ")
    assert told in line


def test_one_that_does_not_answer_delays_nothing_and_is_used_later(installed):
    installed(
        "shelf = shelf_of_others:open",
        "import time\n" + dedent(SHELF) + "\ndef open(*of): time.sleep(0.4); return Shelf(*of)\n",
    )
    begun = time.monotonic()
    with open_stores(["shelf"], {"PREFIX": ""}, deadline=0.1) as stores:
        assert time.monotonic() - begun < 0.3
        stores.keep("k", b"v")
        assert stores.faults == ("shelf: it has not answered for 0.1 s",)
        time.sleep(0.4)
        stores.keep("k", b"v")
        assert stores.find("k") == b"v"
        assert stores.faults == ()
