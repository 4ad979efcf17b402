"""A helper process for tests: it echoes, prints, sleeps, dies, or says who it is."""

from __future__ import annotations

import os
import sys
import time

from vllm.ipc.helper import Questions


def main() -> None:
    questions = Questions()
    for question in questions:
        print("what a library prints")
        match question.split(b" ", 1):
            case [b"sleep", seconds]:
                time.sleep(float(seconds))
            case [b"die", status]:
                os._exit(int(status))
            case [b"variable", name]:
                questions.answer(os.environ.get(name.decode(), "").encode())
                continue
            case [b"path"]:
                questions.answer("\n".join(sys.path).encode())
                continue
        questions.answer(question)


if __name__ == "__main__":
    main()
