/* plimsoll for C++17: the functions of plimsoll.h over handles that close themselves, with exceptions. Header-only. */

#ifndef PLIMSOLL_HPP
#define PLIMSOLL_HPP

#include "plimsoll.h"

#include <memory>
#include <stdexcept>
#include <string>
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
    plimsoll_model *get() const noexcept { return model_.get(); }

  private:
    detail::Handle<plimsoll_model, plimsoll_model_close> model_;
};

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
    void run(const std::vector<plimsoll_input> &inputs, const std::vector<plimsoll_output> &outputs) const {
        detail::checked(plimsoll_session_run, get(), inputs.data(), inputs.size(), outputs.data(), outputs.size());
    }
    plimsoll_session *get() const noexcept { return session_.get(); }

  private:
    explicit Session(plimsoll_session *session) : session_(session) {}
    detail::Handle<plimsoll_session, plimsoll_session_close> session_;
};

} // namespace plimsoll

#endif
