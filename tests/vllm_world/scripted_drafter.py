"""A process that speaks the drafter's protocol and misbehaves as told, for the tests of the channel.

Run as the drafter is; `engine` in its specification (on stdin) is {"script": name, "folder": where it counts its
lives, and the limits to say Hello with}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from minedraft.backends.vllm.messages import (
    PROTOCOL_VERSION,
    Asleep,
    Drafted,
    DraftJob,
    Hello,
    JobFailed,
    LoadFailed,
    Message,
    Ping,
    Pong,
    Reset,
    Sleep,
    Stop,
    Wake,
    pack,
    receive,
)


class Drafter:
    def __init__(self) -> None:
        self.connection = socket.socket(fileno=int(sys.argv[1]))
        self.engine = json.load(sys.stdin)["engine"]
        self.script = self.engine["script"]
        lives = Path(self.engine["folder"]) / "lives"
        with lives.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "blocks": self.engine.get("num_gpu_blocks_override")}) + "\n")
        self.life = len(lives.read_text().splitlines())

    def send(self, message: Message) -> None:
        self.connection.sendall(pack(message))

    def hello(self, num_lost: int = 0, num_blocks: int = 9) -> None:
        self.send(Hello(PROTOCOL_VERSION, num_blocks, num_blocks - num_lost, 32, 256, 64, 128))

    def run(self) -> None:
        if self.script == "no start":
            time.sleep(600)
        if self.script == "load fails":
            self.send(LoadFailed("no such model"))
            time.sleep(600)
        smaller = self.script == "comes back smaller" and self.life == 2
        self.hello(num_blocks=8 if smaller else 9)
        if self.script == "dies":
            sys.exit(3)
        if self.script == "floods":
            while True:
                self.send(Drafted(77, [], None, 0.0, 0.0))
        while (order := receive(self.connection)) is not None and not isinstance(order, Stop):
            self.answer(order)

    def answer(self, order: Message) -> None:
        if isinstance(order, Ping) and self.script != "silent":
            self.send(Pong())
        elif isinstance(order, DraftJob):
            self.draft(order)
        elif isinstance(order, Reset) and self.script != "no reset":
            self.hello(num_lost=1 if self.script == "leaks" else 0)
        elif isinstance(order, Sleep | Wake):
            self.nap(order)

    def nap(self, order: Sleep | Wake) -> None:
        with (Path(self.engine["folder"]) / "naps").open("a") as file:
            file.write(f"{type(order).__name__}\n")
        if self.script == "dies asleep" and self.life == 1:
            sys.exit(3)
        if isinstance(order, Wake):
            self.hello()
        else:
            self.send(Asleep())

    def draft(self, job: DraftJob) -> None:
        if self.script in ("leaks", "no reset", "fails"):
            self.send(JobFailed(job.work_id, "asked to fail"))
        elif self.script == "comes back smaller" and self.life == 1:
            sys.exit(3)
        elif self.script != "owes" or self.life > 1:
            now_s = time.monotonic()
            self.send(Drafted(job.work_id, [[7] * entry.num_draft for entry in job.entries], None, now_s, now_s))


if __name__ == "__main__":
    Drafter().run()
