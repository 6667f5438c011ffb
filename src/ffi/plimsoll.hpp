/* plimsoll for C++17: the functions of plimsoll.h over handles that close themselves, with exceptions. Header-only. */

#ifndef PLIMSOLL_HPP
#define PLIMSOLL_HPP

#include "plimsoll.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace plimsoll {

/* An error with its text, its code, and its facts as JSON. */
class Error : public std::runtime_error {
  public:
    explicit Error(plimsoll_error *error)
        : std::runtime_error(plimsoll_error_text(error)), code_(plimsoll_error_code(error)),
          exit_code_(plimsoll_error_exit_code(error)), fields_(plimsoll_error_fields(error)) {
        plimsoll_error_free(error);
    }
    int code() const noexcept { return code_; }
    int exit_code() const noexcept { return exit_code_; }
    const std::string &fields() const noexcept { return fields_; }

  private:
    int code_, exit_code_;
    std::string fields_;
};

namespace detail {

/* Calls a function of plimsoll.h with a place for its error, which is thrown. */
template <class Function, class... More> void checked(Function function, More... more) {
    plimsoll_error *error = nullptr;
    if (function(more..., &error) != PLIMSOLL_OK) throw Error(error);
}

/* The handle that a function makes. */
template <class T, class Function, class... More> T *made(Function function, More... more) {
    T *handle = nullptr;
    checked(function, more..., &handle);
    return handle;
}

/* The text that a function makes. */
template <class Function, class... More> std::string told(Function function, More... more) {
    std::unique_ptr<char, void (*)(char *)> text(made<char>(function, more...), plimsoll_text_free);
    return text.get();
}

template <class T, void (*close)(T *)> struct Closes {
    void operator()(T *handle) const noexcept { close(handle); }
};
template <class T, void (*close)(T *)> using Handle = std::unique_ptr<T, Closes<T, close>>;

/* The name of a type of C++. */
template <class T> constexpr const char *dtype() {
    if constexpr (std::is_same_v<T, float>) return "f32";
    else if constexpr (std::is_same_v<T, double>) return "f64";
    else {
        static_assert(std::is_integral_v<T> && !std::is_same_v<T, bool>, "expected numbers; others by the name of their type");
        constexpr const char *names[2][4] = {{"u8", "u16", "u32", "u64"}, {"i8", "i16", "i32", "i64"}};
        return names[std::is_signed_v<T>][sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
    }
}

inline const char *or_null(const std::string &text) { return text.empty() ? nullptr : text.c_str(); }

} // namespace detail

/* Refuses a library of another version of the interface. */
inline void init() { detail::checked(plimsoll_init, PLIMSOLL_ABI_VERSION); }

/* A plan: what lies where, and when. */
class Plan {
  public:
    explicit Plan(plimsoll_plan *plan) : plan_(plan) {}
    static Plan load(const std::string &path) { return Plan(detail::made<plimsoll_plan>(plimsoll_plan_load, path.c_str())); }
    std::uint64_t bytes() const { return plimsoll_plan_bytes(get()); }
    std::uint64_t lent_bytes() const { return plimsoll_plan_lent_bytes(get()); }
    std::string table() const { return detail::told(plimsoll_plan_table, get()); }
    std::string json() const { return detail::told(plimsoll_plan_json, get()); }
    std::string memory() const { return detail::told(plimsoll_plan_memory, get()); }
    std::string diff(const Plan &after) const { return detail::told(plimsoll_plan_diff, get(), after.get()); }
    void check() const { detail::checked(plimsoll_plan_check, get()); }
    void save(const std::string &path) const { detail::checked(plimsoll_plan_save, get(), path.c_str()); }
    plimsoll_plan *get() const noexcept { return plan_.get(); }

  private:
    detail::Handle<plimsoll_plan, plimsoll_plan_close> plan_;
};

/* A model's file as options shape it. Options are JSON. */
class Model {
  public:
    explicit Model(const std::string &path, const std::string &options = "")
        : model_(detail::made<plimsoll_model>(plimsoll_model_open, path.c_str(), options.c_str())) {}
    Model(const void *data, std::size_t bytes, const std::string &options)
        : model_(detail::made<plimsoll_model>(plimsoll_model_open_bytes, static_cast<const std::uint8_t *>(data), bytes, options.c_str())) {}
    std::string name() const { return plimsoll_model_name(get()); }
    /* For a target; without one, for the device of the options. */
    Plan plan(const std::string &target = "") const {
        return Plan(detail::made<plimsoll_plan>(plimsoll_model_plan, get(), detail::or_null(target)));
    }
    std::string advise(const std::string &target = "cpu") const { return detail::told(plimsoll_model_advise, get(), target.c_str()); }
    std::string max_batch(const std::string &target = "cpu", const std::string &dim = "") const {
        return detail::told(plimsoll_model_max_batch, get(), target.c_str(), detail::or_null(dim));
    }
    /* Of a training on batches of so many rows, by a method: see Trainer. */
    Plan plan_training(const std::string &target, std::size_t batch, const std::string &method) const {
        return Plan(detail::made<plimsoll_plan>(plimsoll_model_plan_training, get(), target.c_str(), batch, method.c_str()));
    }
    std::string advise_training(const std::string &target, std::size_t batch, const std::string &method) const {
        return detail::told(plimsoll_model_advise_training, get(), target.c_str(), batch, method.c_str());
    }
    std::string max_batch_of_training(const std::string &target, const std::string &method) const {
        return detail::told(plimsoll_model_max_batch_of_training, get(), target.c_str(), method.c_str());
    }
    plimsoll_model *get() const noexcept { return model_.get(); }

  private:
    detail::Handle<plimsoll_model, plimsoll_model_close> model_;
};

/* An array of elements, row-major. */
class Tensor {
  public:
    explicit Tensor(plimsoll_tensor *tensor) : tensor_(tensor) {}
    /* A copy of so many bytes, of elements of a type such as "bf16". */
    Tensor(const std::string &dtype, const std::vector<std::uint64_t> &shape, const void *data, std::size_t bytes)
        : tensor_(detail::made<plimsoll_tensor>(plimsoll_tensor_open, dtype.c_str(), shape.data(), shape.size(), data, bytes)) {}
    template <class T> Tensor(const std::vector<std::uint64_t> &shape, const std::vector<T> &data)
        : Tensor(detail::dtype<T>(), shape, data.data(), data.size() * sizeof(T)) {}
    /* An array of NumPy, .npy, which is mapped. */
    static Tensor load(const std::string &path) { return Tensor(detail::made<plimsoll_tensor>(plimsoll_tensor_load, path.c_str())); }
    plimsoll_port port() const {
        plimsoll_port port;
        detail::checked(plimsoll_tensor_port, get(), &port);
        return port;
    }
    /* The elements, at any address. */
    const void *data() const { return plimsoll_tensor_data(get()); }
    plimsoll_tensor *get() const noexcept { return tensor_.get(); }

  private:
    detail::Handle<plimsoll_tensor, plimsoll_tensor_close> tensor_;
};

/* A tensor with a name. Both outlive what they are given to. */
inline plimsoll_named named(const char *name, const Tensor &tensor) { return {name, tensor.get()}; }

/* An array of the caller's memory. */
template <class T> plimsoll_input input(const char *name, const std::vector<T> &data) {
    return {name, data.data(), data.size() * sizeof(T), PLIMSOLL_HOST};
}
template <class T> plimsoll_output output(const char *name, std::vector<T> &data) {
    return {name, data.data(), data.size() * sizeof(T), PLIMSOLL_HOST};
}

/* A loaded plan, which runs. */
class Session {
  public:
    explicit Session(const Model &model)
        : session_(detail::made<plimsoll_session>(plimsoll_session_open, model.get())) {}
    /* In memory of the caller, which outlives the session. */
    Session(const Model &model, void *memory, std::size_t bytes)
        : session_(detail::made<plimsoll_session>(plimsoll_session_open_in, model.get(), memory, bytes)) {}
    Session fork() const { return Session(detail::made<plimsoll_session>(plimsoll_session_fork, get())); }
    std::string device() const { return plimsoll_session_device(get()); }
    std::size_t inputs() const { return plimsoll_session_inputs(get()); }
    std::size_t outputs() const { return plimsoll_session_outputs(get()); }
    std::size_t states() const { return plimsoll_session_states(get()); }
    plimsoll_port input(std::size_t number) const {
        plimsoll_port port;
        detail::checked(plimsoll_session_input, get(), number, &port);
        return port;
    }
    plimsoll_port output(std::size_t number) const {
        plimsoll_port port;
        detail::checked(plimsoll_session_output, get(), number, &port);
        return port;
    }
    plimsoll_port state(std::size_t number) const {
        plimsoll_port port;
        detail::checked(plimsoll_session_state, get(), number, &port);
        return port;
    }
    /* The elements of a state, and elements for the next run. */
    Tensor get_state(const std::string &name) const {
        return Tensor(detail::made<plimsoll_tensor>(plimsoll_session_get_state, get(), name.c_str()));
    }
    void set_state(const std::string &name, const Tensor &tensor) const {
        detail::checked(plimsoll_session_set_state, get(), name.c_str(), tensor.get());
    }
    void reset_states() const { detail::checked(plimsoll_session_reset_states, get()); }
    void save_states(const std::string &path) const { detail::checked(plimsoll_session_save_states, get(), path.c_str()); }
    void load_states(const std::string &path) const { detail::checked(plimsoll_session_load_states, get(), path.c_str()); }
    void run(const std::vector<plimsoll_input> &inputs, const std::vector<plimsoll_output> &outputs) const {
        detail::checked(plimsoll_session_run, get(), inputs.data(), inputs.size(), outputs.data(), outputs.size());
    }
    plimsoll_session *get() const noexcept { return session_.get(); }

  private:
    explicit Session(plimsoll_session *session) : session_(session) {}
    detail::Handle<plimsoll_session, plimsoll_session_close> session_;
};

/* A model in training, on rows of inputs and their labels. The method is JSON: see plimsoll_trainer_open. */
class Trainer {
  public:
    /* Rows are taken in an order by the seed `shuffle`, or in their own. The tensors may be closed. */
    Trainer(const Model &model, const std::vector<plimsoll_named> &inputs, const Tensor &labels, std::size_t batch,
            const std::string &method, std::uint64_t steps, std::optional<std::uint64_t> shuffle = std::nullopt)
        : trainer_(detail::made<plimsoll_trainer>(plimsoll_trainer_open, model.get(), inputs.data(), inputs.size(), labels.get(), batch,
                                                  method.c_str(), steps, shuffle ? &*shuffle : nullptr)) {}
    Plan plan() const { return Plan(detail::made<plimsoll_plan>(plimsoll_trainer_plan, get())); }
    std::uint64_t steps_per_epoch() const { return plimsoll_trainer_steps_per_epoch(get()); }
    /* The step with this number, from 0 on. */
    plimsoll_step step(std::uint64_t number) const {
        plimsoll_step step;
        detail::checked(plimsoll_trainer_step, get(), number, &step);
        return step;
    }
    /* Over the rows of the training, and over other ones. */
    plimsoll_score evaluate() const { return evaluated({}, nullptr); }
    plimsoll_score evaluate(const std::vector<plimsoll_named> &inputs, const Tensor &labels) const {
        return evaluated(inputs, labels.get());
    }
    /* The trained model as an .onnx file. */
    void save(const std::string &path) const { detail::checked(plimsoll_trainer_save, get(), path.c_str()); }
    plimsoll_trainer *get() const noexcept { return trainer_.get(); }

  private:
    plimsoll_score evaluated(const std::vector<plimsoll_named> &inputs, plimsoll_tensor *labels) const {
        plimsoll_score score;
        detail::checked(plimsoll_trainer_evaluate, get(), inputs.data(), inputs.size(), labels, &score);
        return score;
    }
    detail::Handle<plimsoll_trainer, plimsoll_trainer_close> trainer_;
};

} // namespace plimsoll

#endif
