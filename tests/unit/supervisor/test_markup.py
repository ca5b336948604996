from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from preloadd.supervisor.markup import Html, join, tag


def test_elements_attributes_and_children():
    made = tag("p", "a", None, ["b", [tag("b", "c")]], class_="x", aria_label="y", hidden=True)
    assert made == '<p class="x" aria-label="y" hidden>ab<b>c</b></p>'
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert tag("p", title=None, hidden=False) == "<p></p>"
    assert tag("i", n=0) == '<i n="0"></i>'
    assert isinstance(join(["a"]), Html)


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "<&>\"'") == "<p>&lt;&amp;&gt;&quot;&#x27;</p>"
    assert tag("p", Html("<br>")) == "<p><br></p>"
    assert tag("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.text += data


@given(st.text(), st.text())
def test_whatever_the_text_is_a_browser_sees_just_that(text, title):
    seen = Seen(tag("p", text, title=title))
    assert seen.tags == [("p", [("title", title)])]
    assert seen.text == text
