"""The module on a card of NVIDIA: `python -m unittest` in this folder, with the module on its path. Without a card all of it is skipped."""

import pathlib
import unittest

import numpy as np

import plimsoll

GRAPHS = pathlib.Path(__file__).resolve().parents[2] / "graphs"
DIGITS = GRAPHS / "digits.onnx"
HAS_CARD = any(device.startswith("cuda") for device in plimsoll.devices())


def images():
    return np.load(GRAPHS / "digits-images.npy")


def importing(name):
    try:
        return __import__(name)
    except ImportError:
        raise unittest.SkipTest(f"{name} is not installed") from None


@unittest.skipUnless(HAS_CARD, "there is no card of CUDA")
class Cards(unittest.TestCase):
    def setUp(self):
        self.images = images()
        self.session = plimsoll.Session(DIGITS, batch=len(self.images), device="cuda")
        on_cpu = plimsoll.Session(DIGITS, batch=len(self.images), device="cpu")
        self.expected = on_cpu.run({"image": self.images})["logits"]

    def agrees(self, found):
        np.testing.assert_allclose(np.asarray(found), self.expected, rtol=1e-3, atol=1e-4)

    def test_arrays_of_the_host(self):
        self.assertEqual(self.session.bytes, self.session.allocated)
        self.assertEqual(self.session.bytes, plimsoll.plan(DIGITS, batch=len(self.images), target="cuda").bytes)
        self.agrees(self.session.run({"image": self.images})["logits"])

    def test_tensors_of_torch(self):
        torch = importing("torch")
        given = torch.from_numpy(self.images).cuda()
        out = torch.full((len(self.images), 10), -1.0, device="cuda")
        before = torch.cuda.memory_allocated()
        found = self.session.run({"image": given}, {"logits": out})
        self.assertEqual(torch.cuda.memory_allocated(), before)
        self.assertIs(found["logits"], out)
        self.agrees(out.cpu())
        self.agrees(self.session.run({"image": given})["logits"])
        # A tensor of the host beside one of the card, and back.
        self.agrees(torch.from_dlpack(self.session._session.run({"image": given}, None)["logits"]))

    def test_work_of_another_stream_is_awaited(self):
        torch = importing("torch")
        given = torch.from_numpy(self.images).cuda()
        busy = torch.randn(8192, 8192, device="cuda")
        out = torch.empty(len(self.images), 10, device="cuda")
        for _ in range(5):
            other = torch.cuda.Stream()
            late = torch.zeros_like(given)
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                for _ in range(8):
                    busy @ busy
                late.copy_(given)
                self.session.run({"image": late}, {"logits": out})
                self.agrees(out.cpu())

    def test_arrays_of_cupy(self):
        cupy = importing("cupy")
        given, out = cupy.asarray(self.images), cupy.full((len(self.images), 10), -1.0, dtype="f4")
        pool = cupy.get_default_memory_pool()
        before = pool.used_bytes()
        self.session.run({"image": given}, {"logits": out})
        self.assertEqual(pool.used_bytes(), before)
        self.agrees(cupy.asnumpy(out))

    def test_arrays_of_jax(self):
        jax = importing("jax")
        given = jax.device_put(self.images, jax.devices("gpu")[0])
        self.agrees(self.session.run({"image": given})["logits"])
        # Its arrays never change: they are no place for an output.
        with self.assertRaises(plimsoll.UsageError):
            self.session.run({"image": given}, {"logits": jax.numpy.zeros((len(self.images), 10))})
        found = jax.dlpack.from_dlpack(self.session._session.run({"image": given}, None)["logits"])
        self.agrees(found)

    def test_tensors_that_do_not_fit_are_refused(self):
        torch = importing("torch")
        given = torch.from_numpy(self.images).cuda()
        out = torch.empty(len(self.images), 10, device="cuda")
        for wrong, of in [
            ({"image": given[:5]}, None),
            ({"image": given.half()}, None),
            ({"image": given.flip(-1).transpose(-1, -2)}, None),
            ({"image": given}, {"logits": out[:5]}),
            ({"image": given}, {"logits": out.double()}),
            ({"image": given}, {"logits": torch.empty(10, len(self.images), device="cuda").T}),
        ]:
            with self.assertRaises(plimsoll.PlimsollError):
                self.session.run(wrong, of)
        self.agrees(self.session.run({"image": given})["logits"])

    def test_a_model_trains(self):
        trained = plimsoll.train(
            GRAPHS / "linear.onnxtxt", {"x": GRAPHS / "linear-x.npy"}, GRAPHS / "linear-y.npy",
            batch=16, epochs=5, loss="mse", lr=0.05, device="cuda", progress=False,
        )
        self.assertIn("cuda", trained._trainer.device)

    def test_limits_hold(self):
        with self.assertRaises(plimsoll.DoesNotFit):
            plimsoll.Session(DIGITS, batch=64, device="cuda", memory_limit="100KiB")


if __name__ == "__main__":
    unittest.main()
