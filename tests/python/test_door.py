"""The module plimsoll as a program sees it: `python -m unittest` in this folder, with the module on its path, from the project's root."""

import ast
import doctest
import gc
import importlib
import inspect
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

import plimsoll

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRAPHS = ROOT / "graphs"
DIGITS = GRAPHS / "digits.onnx"
LONG = bool(os.environ.get("PLIMSOLL_LONG"))


def digits():
    return np.load(GRAPHS / "digits-images.npy"), np.load(GRAPHS / "digits-labels.npy")


def command(*arguments):
    """What the command prints as JSON."""
    done = subprocess.run([os.environ["PLIMSOLL_COMMAND"], *map(str, arguments), "--json"], capture_output=True, text=True)
    return json.loads(done.stdout)


class Plans(unittest.TestCase):
    def test_plans_are_those_of_the_command(self):
        for name in ["mlp.onnxtxt", "attention.onnxtxt", "digits.onnx", "unet.onnxtxt"]:
            for target in ["cpu", "cuda", "wgpu"]:
                plan = plimsoll.plan(GRAPHS / name, target=target)
                told = command("plan", GRAPHS / name, "--target", target)
                self.assertEqual(plan.bytes, told["planned_bytes"], (name, target))
                self.assertEqual(plan.assumed, told.get("assumed", []))
        told = command("plan", GRAPHS / "mlp.onnxtxt", "--set", "batch=1..64")
        self.assertEqual(plimsoll.plan(GRAPHS / "mlp.onnxtxt", batch=range(1, 65)).bytes, told["planned_bytes"])
        told = command("plan", DIGITS, "--train", "--loss", "cross_entropy", "--batch", 32)
        self.assertEqual(plimsoll.plan(DIGITS, train={"loss": "cross_entropy", "batch": 32}).bytes, told["planned_bytes"])

    def test_bytes_of_a_file_are_a_model(self):
        self.assertEqual(plimsoll.plan(DIGITS.read_bytes(), batch=4).bytes, plimsoll.plan(DIGITS, batch=4).bytes)

    def test_a_plan_is_drawn_saved_read_checked_and_compared(self):
        plan, other = (plimsoll.plan(DIGITS, batch=batch) for batch in (8, 16))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "plan.json"
            plan.save(path)
            read = plimsoll.load_plan(path)
            self.assertEqual((read.bytes, read.table()), (plan.bytes, plan.table()))
            plimsoll.check(path)
            changed = json.loads(path.read_text())
            changed["programs"][0]["buffers"][0]["offset"] += 1 << 40
            path.write_text(json.dumps(changed))
            with self.assertRaises(plimsoll.PlimsollError):
                plimsoll.check(path)
            self.assertIn("<html", plan.html(pathlib.Path(folder) / "plan.html").read_text()[:200].lower())
        self.assertIn("planned", str(plan))
        self.assertTrue(plan._repr_html_().startswith("<svg") and "<pre>" in plan._repr_html_())
        self.assertIn(f"{other.bytes:,}", str(plimsoll.diff(plan, other)))
        self.assertEqual(plan.classes["constant"], other.classes["constant"])
        self.assertGreater(len(plan.peak.live), 0)

    def test_a_saved_plan_is_one_of_the_command(self):
        with tempfile.TemporaryDirectory() as folder:
            path, again = (pathlib.Path(folder) / name for name in ("plan.json", "again.json"))
            plan = plimsoll.plan(DIGITS, batch=4)
            plan.save(path)
            self.assertTrue(command("check", path)["ok"])
            self.assertEqual(command("run", path, "--model", DIGITS)["memory"]["planned_bytes"], plan.bytes)
            self.assertEqual(json.loads(plan.json())["origin"], json.loads(path.read_text())["origin"])
            # The file of the command has the same origin, and what is read keeps it.
            command("plan", DIGITS, "--batch", 4, "--save", again)
            self.assertEqual(json.loads(again.read_text())["origin"]["models"], json.loads(plan.json())["origin"]["models"])
            plimsoll.load_plan(path).save(again)
            self.assertEqual(again.read_text(), path.read_text())
            # Bytes have no file that it could name.
            plimsoll.plan(DIGITS.read_bytes(), batch=4).save(again)
            self.assertNotIn("origin", json.loads(again.read_text()))

    def test_what_does_not_fit_says_what_would_help(self):
        with self.assertRaises(MemoryError) as caught:
            plimsoll.plan(GRAPHS / "mlp.onnxtxt", batch=64, memory_limit="100KiB")
        error = caught.exception
        self.assertIsInstance(error, plimsoll.DoesNotFit)
        self.assertEqual((error.limit, error.exit_code, pathlib.Path(error.path).name), (102400, 2, "mlp.onnxtxt"))
        self.assertGreater(error.bound, error.limit)
        self.assertTrue(any(remedy["name"] == "half the extent" for remedy in error.remedies))
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.Session(DIGITS, batch=8, memory_limit=1000, device="cpu")
        self.assertTrue(caught.exception.remedies)

    def test_the_largest_batch_is_that_of_the_command(self):
        told = command("max-batch", GRAPHS / "mlp.onnxtxt", "--memory-limit", "2MiB")
        found = plimsoll.max_batch(GRAPHS / "mlp.onnxtxt", memory_limit="2MiB")
        self.assertEqual({name: found[name] for name in ("dim", "limit_bytes", "largest", "next", "plans")},
                         {name: told[name] for name in ("dim", "limit_bytes", "largest", "next", "plans")})
        self.assertEqual((found.extent, found.bytes), (told["largest"]["extent"], told["largest"]["planned_bytes"]))
        found = plimsoll.max_batch(DIGITS, memory_limit="2MiB", train={"loss": "cross_entropy"})
        self.assertEqual(found.dim, "batch")
        self.assertLessEqual(found.bytes, 2 << 20)

    def test_that_no_extent_fits_is_said_as_the_command_says_it(self):
        told = command("max-batch", DIGITS, "--memory-limit", "100KiB")
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.max_batch(str(DIGITS), memory_limit="100KiB")
        error = caught.exception
        found = {"error": str(error), "exit_code": error.exit_code, "needed_bytes": error.needed, "limit_bytes": error.limit}
        self.assertEqual(found, {name: told[name] for name in found})
        self.assertEqual((error.path, error.needed > error.limit), (str(DIGITS), True))
        self.assertEqual(error.advice.peak["bytes"], error.needed)
        self.assertIn("weights in 4 bits", [remedy["name"] for remedy in error.remedies])
        for options in ({"dims": {"batch": 8}}, {"batch": 8}):
            with self.assertRaises(plimsoll.DoesNotFit) as caught:
                plimsoll.max_batch(DIGITS.read_bytes(), memory_limit="100KiB", dim="batch", **options)
            self.assertEqual(len(caught.exception.remedies), len(error.remedies))
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.max_batch(DIGITS, memory_limit="1KiB", train={"loss": "cross_entropy"})
        self.assertEqual(caught.exception.limit, 1024)
        self.assertIsInstance(caught.exception.remedies, list)

    def test_other_verbs_answer(self):
        self.assertIn("remedies", dir(plimsoll.advise(DIGITS, batch=8)))
        fitting = plimsoll.fit(GRAPHS / "mlp.onnxtxt", batch=8, memory_limit=660000, cards=4, target="cpu")
        self.assertEqual(fitting.fewest["cards"], 2)
        compared = plimsoll.compare(GRAPHS / "mlp.onnxtxt", batch=8, runs=1, device="cpu")
        self.assertIn("planned", str(compared))
        times = plimsoll.bench(DIGITS, runs=3, device="cpu", batch=2)
        self.assertEqual(len(times.all), 3)
        self.assertEqual(plimsoll.place([(64, 0, 2), (64, 1, 3), (64, 2, 4)])[1], 128)
        self.assertTrue(plimsoll.devices()[-1].startswith("cpu"))

    def test_every_verb_of_the_command_is_there(self):
        verbs = {"plan", "run", "bench", "compare", "max_batch", "check", "diff", "train", "place", "fit", "advise"}
        self.assertLessEqual(verbs, set(plimsoll.__all__))
        for name in plimsoll.__all__:
            self.assertTrue(getattr(plimsoll, name).__doc__ or name == "Tensor", name)


class Runs(unittest.TestCase):
    def test_digits_are_read(self):
        images, labels = digits()
        session = plimsoll.Session(DIGITS, batch=len(images), device="cpu")
        right = (session.run({"image": images})["logits"].argmax(1) == labels).mean()
        self.assertGreater(right, 0.9)
        self.assertEqual(session.bytes, session.allocated)
        out = np.empty((len(images), 10), "f4")
        found = session.run({"image": images}, {"logits": out})["logits"]
        self.assertIs(found, out)
        self.assertGreater((out.argmax(1) == labels).mean(), 0.9)

    def test_a_range_takes_each_shape(self):
        images, _ = digits()
        session = plimsoll.Session(DIGITS, batch=range(1, 17), device="cpu")
        whole = session.run({"image": images[:16]})["logits"]
        for rows in (1, 3, 16):
            np.testing.assert_allclose(session.run({"image": images[:rows]})["logits"], whole[:rows], atol=1e-5)
        with self.assertRaises(plimsoll.UsageError):
            session.run({"image": images[:17]})

    def test_the_quick_start_of_onnxruntime_runs(self):
        images, _ = digits()
        session = plimsoll.InferenceSession(DIGITS, providers=["CPUExecutionProvider"])
        input_name, label_name = session.get_inputs()[0].name, session.get_outputs()[0].name
        self.assertEqual(session.get_inputs()[0].shape, ["batch", 1, 8, 8])
        self.assertEqual(session.get_inputs()[0].type, "tensor(float)")
        one = session.run([label_name], {input_name: images[:1]})[0]
        all_ = session.run(None, {input_name: images[:5]})[0]
        np.testing.assert_allclose(one, all_[:1], atol=1e-5)
        binding, out = session.io_binding(), np.empty((5, 10), "f4")
        binding.bind_cpu_input(input_name, images[:5])
        binding.bind_output(label_name, out)
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], all_)
        self.assertIs(binding.copy_outputs_to_cpu()[0], out)

    def test_nothing_is_copied_on_the_way(self):
        # An array is read where it lies: what another thread's write would change is the array itself, and none other is made. So a run
        # with outputs given leaves the process's memory as it was.
        import tracemalloc

        images, _ = digits()
        session = plimsoll.Session(DIGITS, batch=len(images), device="cpu")
        out = {"logits": np.empty((len(images), 10), "f4")}
        feeds = {"image": images}
        session.run(feeds, out)
        tracemalloc.start()
        session.run(feeds, out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.assertLess(peak, 10_000)

    def test_two_threads_on_two_forks(self):
        images, _ = digits()
        session = plimsoll.Session(DIGITS, batch=len(images), forks=2, threads=1, device="cpu")
        expected = session.run({"image": images})["logits"]
        forks, wrong = [session, session.fork()], []

        def work(fork):
            for _ in range(20):
                if not np.array_equal(fork.run({"image": images})["logits"], expected):
                    wrong.append(fork)

        threads = [threading.Thread(target=work, args=(fork,)) for fork in forks]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual(wrong, [])
        with self.assertRaises(plimsoll.PlimsollError):
            session.fork()

    def test_tensors_cross_by_dlpack(self):
        trained = linear(steps=1)
        weight = trained._trainer.weight("w")
        array = np.from_dlpack(weight)
        del weight
        gc.collect()
        self.assertEqual(array.shape, (10, 1))
        self.assertTrue(np.isfinite(array).all())

        class Lender:
            """An array of which only DLPack is known."""

            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **_):
                return self.array.__dlpack__()

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        images, _ = digits()
        session = plimsoll.Session(DIGITS, batch=len(images), device="cpu")
        expected = session.run({"image": images})["logits"]
        np.testing.assert_array_equal(session.run({"image": Lender(images.copy())})["logits"], expected)
        with self.assertRaisesRegex(plimsoll.UsageError, "contiguous"):
            session.run({"image": Lender(images.copy()[:, :, ::-1])})
        try:
            import torch
        except ImportError:
            return
        tensor = torch.from_numpy(images.copy())
        np.testing.assert_array_equal(session.run({"image": tensor})["logits"], expected)
        self.assertEqual(torch.from_dlpack(trained._trainer.weight("w")).shape, (10, 1))

    def test_states_are_read_set_and_saved(self):
        session = plimsoll.Session(GRAPHS / "sgd.onnxtxt", training=True, device="cpu")
        name = session.states[0]
        before = session.state(name).copy()
        session.set_state(name, before + 1)
        np.testing.assert_array_equal(session.state(name), before + 1)
        with tempfile.TemporaryDirectory() as folder:
            session.save_states(pathlib.Path(folder) / "s.safetensors")
            session.reset_state()
            np.testing.assert_array_equal(session.state(name), before)
            session.load_states(pathlib.Path(folder) / "s.safetensors")
        np.testing.assert_array_equal(session.state(name), before + 1)

    def test_many_sessions_leave_nothing_behind(self):
        def resident():
            return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        images, _ = digits()
        for number in range(500 if LONG else 100):
            session = plimsoll.Session(DIGITS, batch=4, device="cpu", threads=1)
            session.run({"image": images[:4]})
            del session
            if number == 20:
                begun = resident()
        self.assertLess(resident() - begun, 8 << 20)

    def test_the_import_is_fast(self):
        code = "import time; t = time.perf_counter(); import plimsoll; print(time.perf_counter() - t)"
        times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) for _ in range(5)]
        # 50 ms on an idle machine; a test shares its.
        self.assertLess(min(times), 0.2)


def linear(**more):
    given = {"batch": 16, "loss": "mse", "lr": 0.01, "device": "cpu", "progress": False, **more}
    return plimsoll.train(GRAPHS / "linear.onnxtxt", {"x": GRAPHS / "linear-x.npy"}, GRAPHS / "linear-y.npy", **given)


class Trainings(unittest.TestCase):
    def test_a_model_learns_in_planned_bytes(self):
        trained = linear(epochs=20)
        planned = plimsoll.plan(GRAPHS / "linear.onnxtxt", train={"loss": "mse", "batch": 16, "lr": 0.01})
        self.assertEqual(trained.bytes, trained.allocated)
        self.assertGreater(planned.bytes, 0)
        self.assertLess(trained.losses[-1], trained.losses[0])
        x, y = np.load(GRAPHS / "linear-x.npy"), np.load(GRAPHS / "linear-y.npy")
        self.assertLess(trained.evaluate({"x": x}, y).loss, trained.losses[0])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trained.onnx"
            trained.save(path)
            found = plimsoll.run(path, {"x": x[:4]}, batch=4, device="cpu")["y"]
            np.testing.assert_allclose(found, x[:4] @ trained.weight("w") + trained.weight("b"), atol=1e-5)

    def test_arrays_are_data(self):
        x, y = np.load(GRAPHS / "linear-x.npy"), np.load(GRAPHS / "linear-y.npy")
        of_arrays = plimsoll.train(GRAPHS / "linear.onnxtxt", {"x": x}, y, batch=16, loss="mse", lr=0.01, device="cpu", progress=False)
        self.assertEqual(of_arrays.losses, linear(epochs=1).losses)

    def test_a_callback_ends_a_training(self):
        trained = linear(steps=50, callback=lambda step, loss: step < 4)
        self.assertEqual(len(trained.losses), 5)

        def fails(step, loss):
            raise ZeroDivisionError("mine")

        with self.assertRaises(ZeroDivisionError):
            linear(steps=50, callback=fails)
        self.assertEqual(len(linear(steps=2).losses), 2)

    def test_a_training_that_does_not_fit_says_what_would_help(self):
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.plan(DIGITS, train={"loss": "cross_entropy", "batch": 64}, memory_limit="64KiB")
        self.assertEqual(caught.exception.limit, 65536)


class Refusals(unittest.TestCase):
    def test_bad_input_has_the_words_of_the_command(self):
        product = lambda feeds, **options: plimsoll.run(GRAPHS / "product.onnxtxt", feeds, **{"dims": {"n": 2}, "device": "cpu", **options})
        a = np.eye(2, dtype="f4")
        for kind, words, work in [
            (plimsoll.FileError, "No such file", lambda: plimsoll.plan("no such file.onnx")),
            (plimsoll.FileError, "no bytes", lambda: plimsoll.plan(b"")),
            (plimsoll.PlimsollError, "(memory)", lambda: plimsoll.plan(b"What is this?")),
            (plimsoll.UsageError, "unknown field 'bach'", lambda: plimsoll.plan(DIGITS, bach=3)),
            (plimsoll.UsageError, "expected one of cpu", lambda: plimsoll.plan(DIGITS, target="tpu")),
            (plimsoll.UsageError, "found 'tpu'", lambda: plimsoll.Session(DIGITS, device="tpu")),
            (plimsoll.UsageError, "found int", lambda: plimsoll.plan(3)),
            (plimsoll.UsageError, "memory_limit", lambda: plimsoll.plan(DIGITS, memory_limit="2GX")),
            (plimsoll.UsageError, "batch", lambda: plimsoll.plan(DIGITS, batch=range(5, 2))),
            (plimsoll.UsageError, "expected a batch", lambda: plimsoll.plan(DIGITS, train={"loss": "mse"})),
            (plimsoll.UsageError, "momentum", lambda: linear(momentum=0.9)),
            (plimsoll.UsageError, "'b' has no place", lambda: product({"a": a})),
            (plimsoll.UsageError, "not an input of the graph", lambda: product({"a": a, "b": a, "c": a})),
            (plimsoll.UsageError, "astype", lambda: product({"a": a, "b": a.astype("f8")})),
            (plimsoll.UsageError, "found float32[3,3]", lambda: product({"a": a, "b": np.eye(3, dtype="f4")})),
            (plimsoll.UsageError, "contiguous", lambda: product({"a": a, "b": np.eye(4, dtype="f4")[::2, ::2]})),
            (plimsoll.UsageError, "found str", lambda: product({"a": a, "b": "text"})),
            (plimsoll.UsageError, "found object", lambda: product({"a": a, "b": object()})),
        ]:
            with self.subTest(words):
                with self.assertRaises(kind) as caught:
                    work()
                self.assertIn(words, str(caught.exception))
        with self.assertRaisesRegex(plimsoll.UsageError, "output 'y': its array cannot be written: expected"):
            session = plimsoll.Session(GRAPHS / "product.onnxtxt", dims={"n": 2}, device="cpu")
            readonly = np.empty((2, 2), "f4")
            readonly.flags.writeable = False
            session.run({"a": a, "b": a}, {"y": readonly})
        # The session is usable afterwards.
        np.testing.assert_array_equal(session.run({"a": a, "b": a})["y"], a)

    def test_the_text_is_that_of_the_command(self):
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.plan(str(DIGITS), batch=8, memory_limit=1000)
        told = command("plan", DIGITS, "--batch", 8, "--memory-limit", 1000)
        self.assertEqual(str(caught.exception), told["error"])


class Corners(unittest.TestCase):
    """What an adversary found."""

    def product(self):
        return plimsoll.Session(GRAPHS / "product.onnxtxt", dims={"n": 2}, device="cpu")

    def test_the_other_byte_order_is_refused(self):
        a = np.eye(2, dtype="f4")
        with self.assertRaisesRegex(plimsoll.UsageError, "other order"):
            self.product().run({"a": a.astype(">f4"), "b": a})
        with self.assertRaisesRegex(plimsoll.UsageError, "other order"):
            self.product().run({"a": a, "b": a}, {"y": np.empty((2, 2), ">f4")})

    def test_outputs_that_overlap_and_lent_ones_are_refused(self):
        weight = linear(steps=1)._trainer.weight("w")
        session = plimsoll.Session(GRAPHS / "linear.onnxtxt", batch=10, device="cpu")
        with self.assertRaisesRegex(plimsoll.UsageError, "cannot be written"):
            session.run({"x": np.zeros((10, 10), "f4")}, {"y": weight})
        self.assertEqual(np.asarray(weight).shape, (10, 1))
        with self.assertRaises(BufferError):
            weight.__dlpack__(dl_device=(2, 0))

    def test_an_output_in_the_memory_of_an_input_is_refused(self):
        x, both = np.eye(2, dtype="f4"), np.zeros((3, 2), "f4")
        for feeds, out, words in [
            ({"a": x, "b": x}, x, "output 'y': its place overlaps that of 'a'"),
            ({"a": np.eye(2, dtype="f4"), "b": x}, x, "output 'y': its place overlaps that of 'b'"),
            ({"a": x, "b": both[:2]}, both[1:], "output 'y': its place overlaps that of 'b'"),
        ]:
            with self.subTest(words), self.assertRaises(plimsoll.UsageError) as caught:
                self.product().run(feeds, {"y": out})
            self.assertEqual(str(caught.exception), words)
        np.testing.assert_array_equal(x, np.eye(2))
        apart = np.zeros((4, 2), "f4")
        apart[:2] = x
        self.product().run({"a": apart[:2], "b": x}, {"y": apart[2:]})
        np.testing.assert_array_equal(apart[2:], x)

    def test_dims_may_have_any_name(self):
        a = np.arange(4, dtype="f4").reshape(2, 2)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "named.onnxtxt"
            path.write_text((GRAPHS / "product.onnxtxt").read_text().replace("n, n", "None, None"))
            session = plimsoll.InferenceSession(path, providers=["CPUExecutionProvider"])
            self.assertEqual(session.get_inputs()[0].shape, ["None", "None"])
            np.testing.assert_array_equal(session.run(None, {"a": a, "b": a})[0], a @ a)
        for name in ("00008", "batch", "None "):
            session = plimsoll.InferenceSession(DIGITS.read_bytes().replace(b"batch", name.encode()))
            self.assertEqual(session.get_inputs()[0].shape, [name.strip(), 1, 8, 8])
        session = plimsoll.InferenceSession(DIGITS.read_bytes().replace(b"batch", b"  ?  "))
        self.assertEqual(session.get_inputs()[0].shape, [None, 1, 8, 8])

    def test_types_that_no_input_has_are_refused(self):
        for value in (np.datetime64("2020-01-01"), np.array(np.datetime64("2020-01-01")), np.array(["2020-01-01"], "M8[D]"), np.zeros(2, "c8")):
            with self.assertRaises(plimsoll.UsageError):
                self.product().run({"a": value, "b": np.eye(2, dtype="f4")})

    def test_scalars_and_counts_of_numpy_are_numbers(self):
        self.assertEqual(plimsoll.plan(DIGITS, batch=np.int64(8)).bytes, plimsoll.plan(DIGITS, batch=8).bytes)
        for work, words in [
            (lambda: plimsoll.plan(DIGITS, batch=8.5), "option batch"),
            (lambda: plimsoll.plan(DIGITS, threads="2"), "option threads"),
            (lambda: plimsoll.plan(DIGITS, dims=[("batch", 8)]), "option dims"),
            (lambda: plimsoll.plan(DIGITS, device="cuda"), "target='cuda'"),
            (lambda: plimsoll.fit(DIGITS, memory_limit="1MiB", cards="3"), "cards"),
            (lambda: plimsoll.bench(DIGITS, runs=0), "runs"),
            (lambda: plimsoll.place([(4, 0)]), "buffer 0"),
            (lambda: plimsoll.compare(DIGITS, {"nope": np.zeros(1, "f4")}, device="cpu"), "not an input"),
            (lambda: linear(batch=0), "batch"),
            (lambda: plimsoll.train(DIGITS, None, None, batch=1, loss="mse"), "data"),
            (lambda: plimsoll.InferenceSession(DIGITS, providers="nope"), "nope"),
            (lambda: plimsoll.InferenceSession(DIGITS).run(None, None), "input_feed"),
            (lambda: plimsoll.plan(DIGITS).diff(5), "found int"),
        ]:
            with self.subTest(words), self.assertRaises(plimsoll.UsageError) as caught:
                work()
            self.assertIn(words, str(caught.exception))

    def test_what_a_newcomer_tried(self):
        images, labels = digits()
        self.assertIn("batch=1", repr(plimsoll.plan(DIGITS)))
        with self.assertRaisesRegex(plimsoll.UsageError, "batch was not given"):
            plimsoll.Session(DIGITS, device="cpu").run({"image": images})
        self.assertEqual(plimsoll.run(DIGITS, {"image": images[:5]}, device="cpu")["logits"].shape, (5, 10))
        with self.assertRaises(plimsoll.DoesNotFit):
            plimsoll.max_batch(DIGITS, memory_limit="100KiB")
        self.assertRegex(repr(plimsoll.max_batch(DIGITS, memory_limit="1MiB")), "extent [0-9]+")
        with self.assertRaisesRegex(plimsoll.UsageError, "looked for"):
            plimsoll.max_batch(DIGITS, memory_limit="1MiB", batch=4)
        with self.assertRaisesRegex(plimsoll.UsageError, "at least 1"):
            plimsoll.plan(DIGITS, batch=0)
        with self.assertRaises(plimsoll.Diverged) as caught:
            linear(epochs=50, optimizer="sgd", lr=1e6)
        self.assertGreater(len(caught.exception.losses), 0)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "own.onnx"
            linear(steps=1).save(path)
            again = plimsoll.train(path, {"x": GRAPHS / "linear-x.npy"}, GRAPHS / "linear-y.npy", batch=16, loss="mse", device="cpu", progress=False)
            with self.assertRaisesRegex(plimsoll.UsageError, "overwrite"):
                again.save(path)
            again.save(path, overwrite=True)
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.plan(GRAPHS / "mlp.onnxtxt", batch=64, memory_limit="900KiB")
        sizes = [remedy["planned_bytes"] for remedy in caught.exception.remedies]
        self.assertEqual(sizes, sorted(sizes))
        self.assertLess(sizes[-1], caught.exception.needed)
        self.assertNotIn("json", dir(plimsoll))

    def test_arrays_and_files_take_as_many_steps(self):
        x, y = np.load(GRAPHS / "linear-x.npy"), np.load(GRAPHS / "linear-y.npy")
        of_arrays = plimsoll.train(GRAPHS / "linear.onnxtxt", {"x": x}, y, batch=7, loss="mse", device="cpu", progress=False)
        self.assertEqual(len(of_arrays.losses), len(linear(batch=7).losses))
        self.assertEqual(linear(steps=0).losses, [])
        # The length of a schedule is known before the data are opened, or not: the rates are the same.
        whole = dict(epochs=2, schedule="linear")
        counted = linear(steps=len(linear(**whole).losses), schedule="linear")
        self.assertEqual(linear(**whole).losses, counted.losses)

    def test_a_training_that_does_not_fit_has_remedies(self):
        with self.assertRaises(plimsoll.DoesNotFit) as caught:
            plimsoll.plan(DIGITS, train={"loss": "cross_entropy", "batch": 64}, memory_limit="64KiB")
        self.assertGreater(caught.exception.bound, 65536)
        self.assertTrue(caught.exception.remedies)
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((again.needed, str(again)), (caught.exception.needed, str(caught.exception)))

    def test_ctrl_c_ends_the_work_in_hand(self):
        session = plimsoll.Session(DIGITS, batch=4, device="cpu")
        # A shell that runs this in the background has it ignore the signal.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        begun = time.perf_counter()
        with self.assertRaises(KeyboardInterrupt):
            session._session.bench(10**9, 0)
        self.assertLess(time.perf_counter() - begun, 20)
        self.assertEqual(len(session._session.bench(1, 0)), 1)


class Surface(unittest.TestCase):
    def test_the_stub_is_the_module(self):
        module = importlib.import_module("plimsoll._plimsoll")
        stub = ast.parse((ROOT / "src/python/plimsoll/_plimsoll.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
        public = {name for name in dir(module) if not name.startswith("_")}
        self.assertEqual(public, set(classes) | set(functions))

        def names(node):
            arguments = node.args
            return [argument.arg for argument in arguments.args if argument.arg not in ("self", "cls")]

        for name, node in functions.items():
            self.assertEqual(names(node), list(inspect.signature(getattr(module, name)).parameters), name)
        for name, node in classes.items():
            of = getattr(module, name)
            methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
            there = {method for method in vars(of) if not method.startswith("__")}
            self.assertEqual(there, {method for method in methods if not method.startswith("__")}, name)
            for method, child in methods.items():
                found = vars(of)[method] if method in vars(of) else None
                if callable(found) and not method.startswith("__"):
                    there = [p for p in inspect.signature(found).parameters if p != "self"]
                    self.assertEqual(names(child), there, f"{name}.{method}")

    def test_examples_are_right(self):
        os.chdir(ROOT)
        self.assertEqual(doctest.testmod(plimsoll).failed, 0)
        page = doctest.testfile(str(ROOT / "src/python/README.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
        self.assertGreater(page.attempted, 10)
        self.assertEqual(page.failed, 0)

    def test_a_notebook_is_executed(self):
        try:
            import nbclient
            import nbformat
        except ImportError:
            self.skipTest("no nbclient")
        cells = [
            "import os; os.chdir(%r)" % str(ROOT),
            "import plimsoll\nplan = plimsoll.plan('graphs/digits.onnx', batch=8)\nplan",
            "plimsoll.Session('graphs/digits.onnx', batch=8, device='cpu')",
        ]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
        drawn = notebook.cells[1].outputs[0].data["text/html"]
        self.assertIn("<svg", drawn)


if __name__ == "__main__":
    unittest.main()
