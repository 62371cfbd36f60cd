"""A headless Chromium, spoken to over pipes by the DevTools protocol. `make .browser/chromium` installs one."""

import base64
import contextlib
import itertools
import json
import os
import platform
import select
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".browser"
CHROMIUM = FOLDER / "chromium"
PATIENCE = 60  # seconds until a browser that does not answer counts as stuck


def missing():
    """Returns why no browser can be had, and what installs one; an empty text if there is one."""
    if CHROMIUM.exists():
        return ""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the browser of these tests runs on Linux x86_64 only"
    return "no browser: make .browser/chromium installs one, with npm"


@contextlib.contextmanager
def browser(profile):
    """A running browser; its profile goes into the folder `profile`."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    ends = [in_read, out_write]
    # Chromium reads commands from descriptor 3 and answers on 4: a shell puts the pipes there.
    start = f'exec 9<&{in_read} 8>&{out_write} 3<&9 4>&8 9<&- 8>&-; exec "$@"'
    flags = ["--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-software-rasterizer"]
    flags += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    libraries = f"{FOLDER / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    process = subprocess.Popen(
        ["bash", "-c", start, "chromium", str(CHROMIUM), *flags],
        pass_fds=ends,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
    )
    for end in ends:
        os.close(end)
    try:
        yield Browser(in_write, out_read)
    finally:
        process.kill()
        process.wait()
        os.close(in_write)
        os.close(out_read)


class Browser:
    """One tab. `events` are all that it has told since it opened a page."""

    def __init__(self, to, of):
        self._to, self._of, self._rest, self._numbers = to, of, b"", itertools.count(1)
        self._session, self.events = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Returns what the browser answers to a command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            assert select.select([self._of], [], [], PATIENCE)[0], "the browser does not answer"
            found = os.read(self._of, 1 << 20)
            assert found, "the browser is gone"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page, width=1280, dark=False):
        """Show the file `page` in a window of this width and theme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events = []
        self.call("Page.navigate", url=Path(page).as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, expression):
        """Returns the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def count(self, selector):
        return self.ask(f"document.querySelectorAll('{selector}').length")

    def focus(self, selector):
        self.ask(f"document.querySelector('{selector}').focus()")

    def press(self, key, times=1):
        """Press a key, by its name in JavaScript."""
        for _ in range(times):
            self._press(key)

    def _press(self, key):
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path):
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self):
        """What went wrong on the page: exceptions, errors on the console, refusals."""
        told = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in told]

    @property
    def requests(self):
        """The addresses that the page has asked for, itself among them."""
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]
