"""The page in a real browser: chat, tokens, lanes, keys, and that text never becomes HTML."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from engine_samples import make_runtime as letters_runtime
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from server_samples import Serving, fake_model, serving
from test_server_clients import until
from test_step_log import reciter
from tool_samples import make_runtime as pieces_runtime
from tool_samples import writer

from headrace.backends.fake import FakeBackend

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="chromium and chromedriver are not installed (Debian: chromium, chromium-driver)",
    ),
]


class Page:
    """The page of a server in a browser; elements by CSS selectors."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, ready: bool = True) -> Page:
        self.driver.get(f"{url}/")
        if ready:
            until(lambda: bool(self.all("#model option")))
        return self

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def text(self, selector: str) -> str:
        """Of all that fit, at one moment: an answer that comes replaces its parts."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join()"
        return str(self.run(script, selector))

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def is_busy(self) -> bool:
        return bool(self.one("#stop").is_displayed())

    def ask(self, text: str) -> str:
        """Send a message and wait for the whole answer."""
        self.one("#prompt").send_keys(text + Keys.ENTER)
        until(lambda: not self.is_busy())
        return self.answer()

    def answer(self) -> str:
        """The newest one, its spaces as they are."""
        script = "return [...document.querySelectorAll('.assistant .text')].at(-1).textContent"
        return str(self.run(script))

    def look(self, width: int, scheme: str = "light") -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """What the browser's console says, of policies broken and scripts failed."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options, Service(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Page:
    found = Page(driver)
    found.look(1280)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    loaders = {"letters": fake_model(), "other": lambda: letters_runtime(reciter())}
    with serving(loaders) as running:
        yield running


def clear(page: Page) -> None:
    page.run("localStorage.clear()")


def test_a_conversation(page: Page, server: Serving) -> None:
    clear(page.open(server.url))
    page.open(server.url)
    assert page.one("#empty").is_displayed()
    page.one("[name=max_tokens]").send_keys("12")
    page.one("[name=temperature]").send_keys("0")
    expected = server.runtime("letters").chat(
        [{"role": "user", "content": "hello"}], max_new_tokens=12, temperature=0.0
    )
    assert page.ask("hello") == expected.text
    assert "12 tokens" in page.text(".assistant .facts")
    assert not page.one("#empty").is_displayed()
    shades = {e.get_attribute("class").split()[1] for e in page.all(".assistant .t")}
    assert shades <= {f"h{i}" for i in range(7)} and len(shades) > 1
    # It is there again after a reload, as are the parameters.
    page.open(server.url)
    assert page.answer() == expected.text
    assert page.one("[name=max_tokens]").get_attribute("value") == "12"
    # What follows knows what was said before.
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": expected.text},
        {"role": "user", "content": "more"},
    ]
    again = server.runtime("letters").chat(messages, max_new_tokens=12, temperature=0.0)
    assert page.ask("more") == again.text
    # A new chat, and back.
    page.one("#new").click()
    assert not page.all(".message")
    page.one("#notice button").click()
    assert len(page.all(".message")) == 4
    assert not page.complaints()
    script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    assert all(name.startswith(server.url) for name in page.run(script))


def test_a_token_tells_what_it_was_drawn_from(page: Page, server: Serving) -> None:
    clear(page.open(server.url))
    page.open(server.url)
    page.one("[name=max_tokens]").send_keys("8")
    page.ask("abc")
    token = page.all(".assistant .t")[2]
    ActionChains(page.driver).move_to_element(token).perform()
    inspector = page.one("#inspector")
    assert inspector.is_displayed() and "nats" in inspector.text
    assert len(page.all("#inspector li")) == 5
    likely = [float(text.rpartition("\n")[2].rstrip("%")) for text in page.texts("#inspector li")]
    assert likely == sorted(likely, reverse=True) and 0 < sum(likely) <= 100.1
    ActionChains(page.driver).move_to_element(page.one(".bar h1")).perform()
    assert not inspector.is_displayed()


def test_all_of_it_by_keyboard(page: Page, server: Serving) -> None:
    clear(page.open(server.url))
    page.open(server.url)
    page.one("[name=max_tokens]").send_keys("6")
    page.run("document.querySelector('#prompt').focus()")
    page.press("abc", Keys.ENTER)
    until(lambda: len(page.all(".assistant .t")) == 6 and not page.is_busy())
    # Backwards from the prompt: copy, retry, the answer, edit.
    back = ActionChains(page.driver).key_down(Keys.SHIFT)
    back.send_keys(Keys.TAB, Keys.TAB, Keys.TAB).key_up(Keys.SHIFT).perform()
    focused = "return document.activeElement.dataset.index ?? document.activeElement.className"
    assert page.run(focused) == "text"
    page.press(Keys.ARROW_RIGHT)
    assert page.run(focused) == "0" and page.one("#inspector").is_displayed()
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.run(focused) == "2"
    page.press(Keys.END)
    assert page.run(focused) == "5"
    page.press(Keys.ESCAPE)
    assert not page.one("#inspector").is_displayed()


def test_text_is_never_html(page: Page) -> None:
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script><b>&amp;</b>'
    loaders = {"evil": lambda: pieces_runtime("hermes", writer(evil))}
    with serving(loaders) as running:
        page.open(running.url)
        assert page.ask(evil) == evil
        assert page.text(".user .text") == evil
        ActionChains(page.driver).move_to_element(page.all(".assistant .t")[0]).perform()
        assert not page.all("main img, main script, main b, #inspector img")
        page.open(running.url)  # also when it comes out of the storage
        assert page.answer() == evil and page.driver.title == "headrace"
        assert not page.complaints()
        with pytest.raises(Exception, match="TrustedHTML"):
            page.run("document.body.innerHTML = '<b>x</b>'")
        script = "const s = document.createElement('style'); s.textContent = 'b {}'; "
        page.run(script + "document.head.append(s)")
        assert any("Content Security Policy" in line for line in page.complaints())


def test_stop_retry_and_edit(page: Page) -> None:
    backend = FakeBackend(max_slots=4, context_tokens=4096, delay_ms=5)
    with serving({"slow": fake_model(backend)}) as running:
        runtime = running.runtime("slow")
        page.open(running.url)
        page.one("#prompt").send_keys("abc" + Keys.ENTER)
        until(lambda: len(page.all(".assistant .t")) > 3)
        page.press(Keys.ESCAPE)
        until(lambda: runtime.occupancy == (0, 0) and not page.is_busy())
        assert "stopped" in page.text(".assistant .facts") and page.answer()
        page.one("[name=max_tokens]").send_keys("5")
        page.one(".assistant button").click()  # retry
        until(lambda: "stopped" not in page.text(".assistant footer") and not page.is_busy())
        until(lambda: len(page.all(".assistant .t")) <= 5)
        first = page.answer()
        page.one(".user button").click()
        field = page.one(".edit textarea")
        assert field.get_attribute("value") == "abc"
        field.send_keys("d" + Keys.ENTER)
        until(lambda: page.text(".user .text") == "abcd" and not page.is_busy())
        assert len(page.all(".message")) == 2 and page.answer() != first
        page.one(".user button").click()
        page.press(Keys.ESCAPE)
        assert page.text(".user .text") == "abcd"


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    with serving({"letters": fake_model()}, api_key="secret") as running:
        page.open(running.url, ready=False)
        until(lambda: page.one("#key-dialog").is_displayed())
        page.one("#key").send_keys("wrong" + Keys.ENTER)
        until(lambda: "not the right one" in page.text("#key-problem"))
        page.one("#key").send_keys("secret" + Keys.ENTER)
        until(lambda: bool(page.all("#model option")))
        page.one("[name=max_tokens]").send_keys("4")
        page.ask("hi")
        assert len(page.all(".assistant .t")) == 4
        assert page.run("return sessionStorage.getItem('headrace.key')") == "secret"
        assert "secret" not in page.run("return JSON.stringify(localStorage)")
        page.complaints()  # the browser writes down every 401


def test_drafts_and_lanes_show(page: Page, server: Serving) -> None:
    clear(page.open(server.url))
    page.open(server.url)
    page.run(
        "const s = document.querySelector('#model'); s.value = 'other';"
        "s.dispatchEvent(new Event('change'))"
    )
    page.one("[name=max_tokens]").send_keys("60")
    page.ask("abc")
    guessed = page.all(".assistant .t.guessed")
    accepted = sum(step.accepted for step in server.runtime("other").steps)
    assert 0 < len(guessed) <= accepted
    ActionChains(page.driver).move_to_element(guessed[0]).perform()
    assert "guessed ahead" in page.text("#inspector")
    figures = "return document.querySelector('#figures').textContent"
    until(lambda: f"Guesses right{accepted} of " in page.run(figures))
    pixels = (
        "const c = document.querySelector('#lanes'); const p = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; return p.filter((x) => x).length"
    )
    assert page.run(pixels) > 1000
    assert " steps" in page.one("#lanes").get_attribute("aria-label")


def test_what_goes_wrong_is_said(page: Page) -> None:
    with serving({"letters": fake_model(FakeBackend(fail_at=[3]))}) as running:
        page.open(running.url)
        page.one("[name=max_tokens]").send_keys("9")
        page.ask("abc")
        assert "the server failed" in page.text(".problem")
        page.one(".assistant button").click()
        until(lambda: not page.all(".problem") and not page.is_busy())
        assert page.answer()
        page.ask("abc " * 100)
        assert "the context holds" in page.text(".problem")
    page.complaints()


def test_the_end_of_an_answer_is_in_sight(page: Page, server: Serving) -> None:
    page.look(390)
    clear(page.open(server.url))
    for _ in range(4):
        page.ask("a long line without an end " * 6)
    bottoms = "return ['#scroller', '.message:last-child footer'].map(selector =>"
    bottoms += " document.querySelector(selector).getBoundingClientRect().bottom)"
    scroller, footer = page.run(bottoms)
    assert page.run("return document.querySelector('#scroller').scrollTop") > 0
    assert footer <= scroller


@pytest.mark.parametrize("width", [1280, 390])
def test_widths_and_schemes(page: Page, server: Serving, width: int) -> None:
    clear(page.open(server.url))
    page.open(server.url)
    page.one("[name=max_tokens]").get_attribute("value")
    page.ask("a long line without an end " * 6)
    grounds = set()
    for scheme in ("light", "dark"):
        page.look(width, scheme)
        assert page.run("return document.documentElement.scrollWidth") <= width
        grounds.add(page.run("return getComputedStyle(document.documentElement).backgroundColor"))
        assert page.one("#prompt").is_displayed() and page.one("#send").is_displayed()
        if width < 1000:
            assert not page.one("#lanes").is_displayed()
            page.one("#toggle-panel").click()
        assert page.one("#lanes").is_displayed()
        box = page.run("return document.querySelector('#panel').getBoundingClientRect().toJSON()")
        assert 0 <= box["left"] < box["right"] <= width
        if width < 1000:
            page.press(Keys.ESCAPE)
            assert not page.one("#lanes").is_displayed()
    assert len(grounds) == 2
