"""A chat window around a model that runs in a process of its own.

    python chat.py PACKAGE [SEED]      # a folder made by runtime-export

Tk belongs to the main thread. The runtime calls back on its own thread, so pieces of an answer go
through a queue that the window looks into thirty times a second; nothing here ever waits.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
import tkinter as tk
from tkinter import scrolledtext
from typing import Any

import headrace.runtime
from headrace.runtime import GenerationConfig, Runtime

LOOK_MS = 33
CONFIG = GenerationConfig(temperature=0.7, top_p=0.9, max_new_tokens=512)


class ChatWindow:
    """The window and the conversation. `config` says how answers are sampled."""

    def __init__(self, root: tk.Tk, package: str, config: GenerationConfig) -> None:
        self.root, self.config = root, config
        self.runtime: Runtime | None = None
        self.messages: list[dict[str, str]] = []
        self.handle: Any = None  # of the answer under way
        self.news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

        root.title("headrace chat")
        root.protocol("WM_DELETE_WINDOW", self.close)
        self.log = scrolledtext.ScrolledText(root, wrap="word", state="disabled")
        self.entry = tk.Entry(root)
        self.button = tk.Button(root, text="Send", command=self.send_or_stop)
        self.status = tk.Label(root, text="loading...", anchor="w")
        self.status.pack(side="bottom", fill="x")
        self.log.pack(side="top", fill="both", expand=True)
        self.entry.pack(side="left", fill="x", expand=True)
        self.button.pack(side="right")
        self.entry.bind("<Return>", lambda event: self.send())
        self.entry.focus()

        threading.Thread(target=self._load, args=(package,), daemon=True).start()
        self.look()

    def _load(self, package: str) -> None:
        try:
            self.news.put(("loaded", Runtime.load(package, isolated=True)))
        except headrace.runtime.HeadraceError as error:
            self.news.put(("failed", error))

    def look(self) -> None:
        """Show what has come since the last look."""
        while not self.news.empty():
            kind, value = self.news.get()
            if kind == "loaded":
                self.runtime = value
                self.status["text"] = f"ready: {value.capabilities.name}"
            elif kind == "failed":
                self.status["text"] = str(value)
            elif value is not None:
                self.show(value.text)
                self.messages[-1]["content"] += value.text
            else:
                self.finish()
        self.root.after(LOOK_MS, self.look)

    def send_or_stop(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
        else:
            self.send()

    def send(self) -> None:
        """Ask what is in the entry."""
        text = self.entry.get().strip()
        if not text or self.runtime is None or self.handle is not None:
            return
        self.entry.delete(0, "end")
        self.show(f"You: {text}\n\n")
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            self.handle = self.runtime.submit(
                asked, self.config, on_delta=lambda delta: self.news.put(("piece", delta))
            )
        except headrace.runtime.HeadraceError as error:
            self.status["text"] = str(error)
            return
        self.messages = [*asked, {"role": "assistant", "content": ""}]
        self.button["text"] = "Stop"
        self.status["text"] = "answering..."

    def finish(self) -> None:
        """The answer is complete, was stopped, or failed."""
        try:
            done = self.handle.result(0)
            self.status["text"] = f"{done.completion_tokens} tokens, {done.finish_reason}"
        except headrace.runtime.HeadraceError as error:
            self.status["text"] = str(error)
        self.handle = None
        self.button["text"] = "Send"
        self.show("\n\n")

    def show(self, text: str) -> None:
        self.log["state"] = "normal"
        self.log.insert("end", text)
        self.log["state"] = "disabled"
        self.log.see("end")

    def close(self) -> None:
        """Hide at once; end the engine's process and the window."""
        self.root.withdraw()
        if self.runtime is not None:
            self.runtime.close()
        self.root.destroy()


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: chat PACKAGE [SEED]", file=sys.stderr)
        return 2
    seed = int(sys.argv[2]) if len(sys.argv) == 3 else None
    root = tk.Tk(className="chat")
    ChatWindow(root, sys.argv[1], dataclasses.replace(CONFIG, seed=seed))
    root.mainloop()
    return 0


if __name__ == "__main__":
    headrace.runtime.freeze_support()  # in a frozen app this program is its own engine process
    sys.exit(main())
