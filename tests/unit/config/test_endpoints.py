import pytest
from pydantic import TypeAdapter, ValidationError

from preloadd.config.endpoints import MAX_ENDPOINTS, Endpoints

ENDPOINTS = TypeAdapter(Endpoints)


def test_a_list_is_kept_as_it_was_written():
    texts = ["node-1:9470", "http://node-2:9470", "[::1]:9470"]
    assert ENDPOINTS.validate_python(texts) == tuple(texts)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a:1", "b"], "'b'"),
        (["a:1", "http://a:1/"], "'http://a:1/' is 'a:1' once more"),
        (["a:1", "a:1"], "'a:1' is 'a:1' once more"),
        ([f"a:{port}" for port in range(1, MAX_ENDPOINTS + 2)], "at most 256 items"),
    ],
)
def test_faults_name_the_entry(texts, said):
    with pytest.raises(ValidationError, match="1 validation error") as caught:
        ENDPOINTS.validate_python(texts)
    assert said in str(caught.value)
