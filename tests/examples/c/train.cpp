// Trains a classifier of digits, and saves the trained model; the argument is the file:
// c++ -std=c++17 train.cpp $(pkg-config --cflags --libs plimsoll)

#include <cstring>
#include <iostream>
#include <plimsoll.hpp>

int main(int count, char **arguments) try {
    plimsoll::init();
    const plimsoll::Model model("graphs/digits-fresh.onnx", R"({"device": "cpu", "threads": 1, "memory_limit": "8MiB"})");
    const std::string method = R"({"loss": "cross_entropy", "optimizer": "adam", "lr": 0.001})";
    std::cout << "planned: " << model.plan_training("cpu", 32, method).bytes() << " bytes\n";

    // The trainer has the rows that it needs: the tensors may go.
    const auto trainer = [&] {
        const auto images = plimsoll::Tensor::load("graphs/digits-train-images.npy");
        const auto labels = plimsoll::Tensor::load("graphs/digits-train-labels.npy");
        return plimsoll::Trainer(model, {plimsoll::named("image", images)}, labels, 32, method, 100, 7);
    }();
    const auto images = plimsoll::Tensor::load("graphs/digits-images.npy");
    const auto labels = plimsoll::Tensor::load("graphs/digits-labels.npy");
    const auto before = trainer.evaluate({plimsoll::named("image", images)}, labels);
    for (std::uint64_t number = 0; number < 40; number++) {
        const plimsoll_step step = trainer.step(number);
        if (number % 10 == 0) std::cout << "step " << number << ": loss " << step.loss << '\n';
    }
    const auto after = trainer.evaluate({plimsoll::named("image", images)}, labels);
    std::cout << trainer.plan().bytes() << " bytes, " << trainer.steps_per_epoch() << " steps are an epoch\n";
    std::cout << "the loss on other rows: " << before.loss << " before, " << after.loss << " after; right: " << after.accuracy << '\n';
    if (!(after.loss < before.loss) || !(trainer.evaluate().accuracy > before.accuracy)) return 1;
    if (count > 1) trainer.save(arguments[1]);

    // A wrong method is an exception, and nothing was opened.
    try {
        plimsoll::Trainer(model, {plimsoll::named("image", images)}, labels, 32, R"({"loss": "none"})", 1);
        return 1;
    } catch (const plimsoll::Error &error) {
        if (error.code() != PLIMSOLL_USAGE) throw;
        std::cout << error.what() << '\n';
    }

    // A file that is a training step itself has states, which programs read and write.
    const plimsoll::Session session(plimsoll::Model("graphs/sgd.onnxtxt", R"({"device": "cpu", "threads": 1, "batch": 3, "training": true})"));
    const plimsoll_port port = session.state(0);
    const std::vector<std::uint64_t> shape(port.shape, port.shape + port.rank);
    const std::vector<float> given(port.bytes / sizeof(float), 0.5f);
    session.set_state(port.name, plimsoll::Tensor(shape, given));
    const plimsoll::Tensor state = session.get_state(port.name);
    const bool is_there = state.port().bytes == port.bytes && std::memcmp(state.data(), given.data(), port.bytes) == 0;
    session.reset_states();
    std::cout << session.states() << " states, '" << port.name << "' was written: " << is_there << '\n';
    return is_there ? 0 : 1;
} catch (const plimsoll::Error &error) {
    std::cerr << error.what() << '\n';
    return error.exit_code();
}
