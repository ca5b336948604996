import os

import pytest

from preloadd.rank.generation import chunk_name, manifest_name
from tests.unit.rank.generations import ID, PAGE


def test_it_tells_its_name_and_size(make):
    generation = make()
    assert generation.id == ID
    assert generation.arena_nbytes == 3 * PAGE


def test_descriptors_are_copies_in_the_order_of_the_protocol(make):
    generation = make()
    copies = generation.descriptors()
    originals = [generation.sealed, *generation.chunks]
    assert [os.fstat(fd.fileno()).st_ino for fd in copies] == [
        os.fstat(fd.fileno()).st_ino for fd in originals
    ]
    generation.close()
    assert os.pread(copies[2].fileno(), 2, 0) == b"\2\2"
    for fd in copies:
        assert not os.get_inheritable(fd.fileno())
        fd.close()


@pytest.mark.parametrize("room", [0, 1, 2])
def test_too_few_descriptors_for_all_copies_leave_none(make, descriptors_left, room):
    generation = make()
    with descriptors_left(room), pytest.raises(OSError, match="Too many open files"):
        generation.descriptors()


def test_closing_it_twice_does_no_harm(make):
    generation = make()
    generation.close()
    generation.close()
    assert generation.sealed.closed
    assert all(chunk.closed for chunk in generation.chunks)


def test_names_are_those_of_one_generation():
    assert manifest_name(ID) == f"manifest.{ID}"
    assert chunk_name(ID, 12) == f"chunk.{ID}.12"
