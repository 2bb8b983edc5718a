"""What runs inside of a sandbox: load an answer, call its functions, send back what they return.

Its source is sent in, together with that of protocol.py. No test is ever in here, and nothing that it says is believed
but as values to compare: the answer runs in the same process and may do with it what it likes.
"""

import builtins
import marshal
import os
import resource
import sys


def main(requests, encode, decode, ready) -> None:
    """Confine this process, say so, and run what comes."""
    config = marshal.load(requests)
    confine(config)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)  # told why a start fails until here
    os.write(config["replies"], ready)
    for name in ("exit", "quit"):  # otherwise brought by the module site, which is not loaded
        setattr(builtins, name, sys.exit)
    job = marshal.load(requests)
    if job["program"]:
        os.close(config["replies"])
        requests.close()
        run_program(job["code"])
    else:
        answer_calls(job, config["max_bytes"], requests, config["replies"], encode, decode)


def confine(config: dict) -> None:
    """Set the limits of this process for good, and give up root."""
    for name, value in config["limits"]:
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(number, (value, value))
            except ValueError:
                if sys.platform == "linux":  # macOS knows some that it refuses
                    raise
    if config["uid"] is not None and os.getuid() != config["uid"]:
        os.setgroups([])
        os.setgid(config["uid"])
        os.setuid(config["uid"])


def run_program(code: str) -> None:
    """Run an answer as a program: standard input and output are what it reads and writes."""
    module = new_module("__main__")
    sys.argv = [module.setdefault("__file__", "main.py")]
    exec(compile(code, "main.py", "exec", dont_inherit=True), module)


def answer_calls(job: dict, max_bytes: int, requests, replies: int, encode, decode) -> None:
    """Load an answer, then call its functions as asked, for ever."""
    send(replies, encode(load_or_say_why(job), max_bytes))
    names = sys.modules["answer"].__dict__
    while True:
        size = int.from_bytes(requests.read(4), "little")
        number, name, arguments, keywords = decode(requests.read(size))
        before = encode(arguments, max_bytes)
        reply = call(names, name, arguments, keywords) if name else ("returned", None)
        changed = None
        try:
            changed = None if encode(arguments, max_bytes) == before else arguments
            data = encode((number, *reply, changed), max_bytes)
        except TypeError as error:
            data = encode((number, "unsendable", str(error)[:300], None), max_bytes)
        send(replies, data)


def load_or_say_why(job: dict) -> str:
    """Load the answer; what it raised, or nothing."""
    try:
        load(job["code"], job["prompt"], job["names"])
    except BaseException as error:  # SystemExit as well: an answer that ends the process has failed
        return " ".join((type(error).__name__, describe(error)[1]))
    return ""


def load(code: str, prompt: str, names: list) -> None:
    """Run the source of an answer in a module of its own.

    An answer that is Python by itself must define what is called; the prompt lends it imports and helpers. One that is
    not (the indented body of a function) continues the prompt.
    """
    module = new_module("answer")
    try:
        alone = compile(code, "answer.py", "exec", dont_inherit=True)
    except SyntaxError:
        if not prompt:
            raise
        exec(compile(prompt + code, "answer.py", "exec", dont_inherit=True), module)
        return
    try:
        helpers = compile(prompt, "prompt.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # a prompt that is prose
        helpers = compile("", "prompt.py", "exec")
    exec(helpers, module)
    for name in names:
        module.pop(name, None)
    exec(alone, module)


def new_module(name: str) -> dict:
    """The names of a new module that can be imported (dataclasses and typing look theirs up)."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


def call(names: dict, name: str, arguments: list, keywords: dict) -> tuple:
    """Call a function, or the method of that name of a class ``Solution``: how it ended, and with what."""
    try:
        function = names[name] if name in names else getattr(names["Solution"](), name)
        return "returned", function(*arguments, **keywords)
    except Exception as error:
        return "raised", describe(error)
    except BaseException as error:
        return "exit", describe(error)


def describe(error: BaseException) -> tuple:
    """The built-in type of an exception, or '', and its message."""
    kind = type(error)
    try:
        text = str(error)[:1000]
    except BaseException:  # whatever the answer made of __str__
        text = ""
    return (kind.__name__ if kind.__module__ == "builtins" else ""), text


def send(replies: int, data: bytes) -> None:
    """Write a whole message."""
    view = memoryview(len(data).to_bytes(4, "little") + data)
    while view:
        view = view[os.write(replies, view) :]
