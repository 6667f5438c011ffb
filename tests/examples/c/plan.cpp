// Plans a model, holds it to a limit, finds the batch that fits, and runs it:
// c++ -std=c++17 plan.cpp $(pkg-config --cflags --libs plimsoll)

#include <iostream>
#include <plimsoll.hpp>

int main() try {
    plimsoll::init();
    const plimsoll::Model model("graphs/mlp.onnxtxt", R"({"device": "cpu", "threads": 1, "batch": 8, "memory_limit": "1MiB"})");
    const auto plan = model.plan();
    plan.check();
    std::cout << model.name() << ": " << plan.bytes() << " bytes\n" << plan.table() << '\n';
    std::cout << "the largest batch that fits: " << model.max_batch() << '\n';

    // What does not fit is an exception, which knows the bytes.
    try {
        plimsoll::Model("graphs/mlp.onnxtxt", R"({"device": "cpu", "batch": 8, "memory_limit": 1000})").plan();
        return 1;
    } catch (const plimsoll::Error &error) {
        if (error.code() != PLIMSOLL_FIT || error.exit_code() != 2) throw;
        std::cout << error.what() << '\n' << error.fields() << '\n';
    }

    const plimsoll::Session session(model);
    std::vector<std::vector<float>> data(session.inputs());
    std::vector<plimsoll_input> inputs;
    for (std::size_t number = 0; number < session.inputs(); number++) {
        const plimsoll_port port = session.input(number);
        data[number].assign(port.bytes / sizeof(float), 0.5f);
        inputs.push_back(plimsoll::input(port.name, data[number]));
    }
    const plimsoll_port port = session.output(0);
    std::vector<float> y(port.bytes / sizeof(float));
    session.run(inputs, {plimsoll::output(port.name, y)});
    std::cout << "on " << session.device() << ": " << port.name << "[0] = " << y[0] << '\n';
    return 0;
} catch (const plimsoll::Error &error) {
    std::cerr << error.what() << '\n';
    return error.exit_code();
}
