/* Calls every function, rightly and wrongly: what is wrong is an error in words. */

#include <plimsoll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static plimsoll_error *error;

/* Where a plan may be written. */
static const char *plan_file;

/* Ends the program unless a call returned this code, with this in its words. */
static void found(int line, int code, int expected, const char *words) {
    const char *text = error ? plimsoll_error_text(error) : "";
    int is_so = code == expected && code == plimsoll_error_code(error) && strstr(text, words) != NULL;
    if (!is_so) {
        fprintf(stderr, "line %d: expected code %d with '%s', found %d: %s\n", line, expected, words, code, text);
        exit(1);
    }
    plimsoll_error_free(error);
    error = NULL;
}
#define FAILS(expected, words, call) found(__LINE__, call, expected, words)
#define WELL(call) found(__LINE__, call, PLIMSOLL_OK, "")
#define HOLDS(what) \
    if (!(what)) { fprintf(stderr, "line %d: %s\n", __LINE__, #what); exit(1); }

/* A text that is there and has some words. */
static void has(char *text, const char *words) {
    if (text == NULL || strstr(text, words) == NULL) {
        fprintf(stderr, "expected '%s' in %s\n", words, text ? text : "NULL");
        exit(1);
    }
    plimsoll_text_free(text);
}

static void models(void) {
    plimsoll_model *model = NULL;
    const char *cpu = "{\"device\": \"cpu\", \"threads\": 1, \"batch\": 2}";
    FAILS(PLIMSOLL_USAGE, "version 999", plimsoll_init(999, &error));
    WELL(plimsoll_init(PLIMSOLL_ABI_VERSION, &error));
    HOLDS(plimsoll_init(999, NULL) == PLIMSOLL_USAGE && plimsoll_abi_version() == PLIMSOLL_ABI_VERSION);
    FAILS(PLIMSOLL_USAGE, "the path: expected a text, found NULL", plimsoll_model_open(NULL, NULL, &model, &error));
    FAILS(PLIMSOLL_USAGE, "expected UTF-8", plimsoll_model_open("\xff\xfe", NULL, &model, &error));
    FAILS(PLIMSOLL_USAGE, "a place for the result", plimsoll_model_open("graphs/mlp.onnxtxt", cpu, NULL, &error));
    FAILS(PLIMSOLL_FILE, "nowhere.onnx", plimsoll_model_open("nowhere.onnx", cpu, &model, &error));
    FAILS(PLIMSOLL_USAGE, "bach", plimsoll_model_open("graphs/mlp.onnxtxt", "{\"bach\": 2}", &model, &error));
    FAILS(PLIMSOLL_USAGE, "options", plimsoll_model_open("graphs/mlp.onnxtxt", "{", &model, &error));
    FAILS(PLIMSOLL_USAGE, "found NULL for 12", plimsoll_model_open_bytes(NULL, 12, cpu, &model, &error));
    HOLDS(plimsoll_model_open_bytes((const uint8_t *)"rubbish", 7, cpu, &model, &error) != PLIMSOLL_OK && error != NULL && model == NULL);
    plimsoll_error_free(error);
    error = NULL;

    char *text = NULL;
    WELL(plimsoll_model_open("graphs/mlp.onnxtxt", cpu, &model, &error));
    HOLDS(strlen(plimsoll_model_name(model)) > 0);
    WELL(plimsoll_model_dims(model, &text, &error));
    has(text, "\"batch\":\"2\"");
    WELL(plimsoll_model_advise(model, NULL, &text, &error));
    has(text, "{");
    FAILS(PLIMSOLL_USAGE, "a memory limit", plimsoll_model_max_batch(model, "cpu", NULL, &text, &error));
    FAILS(PLIMSOLL_USAGE, "a memory limit", plimsoll_model_fit(model, "cuda", 1, 2, NULL, &text, &error));
    FAILS(PLIMSOLL_USAGE, "expected a model, found NULL", plimsoll_model_advise(NULL, NULL, &text, &error));
    WELL(plimsoll_model_compare(model, NULL, 0, 1, &text, &error));
    has(text, "\"columns\"");

    plimsoll_plan *plan = NULL, *other = NULL;
    FAILS(PLIMSOLL_USAGE, "target 'tpu'", plimsoll_model_plan(model, "tpu", &plan, &error));
    WELL(plimsoll_model_plan(model, "wgpu", &other, &error));
    WELL(plimsoll_model_plan(model, NULL, &plan, &error));
    HOLDS(plimsoll_plan_bytes(plan) > 0 && plimsoll_plan_bytes(NULL) == 0);
    WELL(plimsoll_plan_check(plan, &error));
    FAILS(PLIMSOLL_USAGE, "expected a plan", plimsoll_plan_check(NULL, &error));
    WELL(plimsoll_plan_table(plan, &text, &error));
    has(text, "bytes");
    WELL(plimsoll_plan_memory(plan, &text, &error));
    has(text, "\"peak\"");
    WELL(plimsoll_plan_diff(plan, other, &text, &error));
    has(text, "\"planned_bytes\"");
    plimsoll_plan_close(other);
    WELL(plimsoll_plan_json(plan, &text, &error));
    WELL(plimsoll_plan_parse(text, &other, &error));
    HOLDS(plimsoll_plan_bytes(other) == plimsoll_plan_bytes(plan));
    plimsoll_text_free(text);
    plimsoll_plan_close(other);
    HOLDS(plimsoll_plan_parse("{\"version\": 1}", &other, &error) == PLIMSOLL_PLAN);
    plimsoll_error_free(error);
    error = NULL;

    const char *path = plan_file;
    WELL(plimsoll_plan_save(plan, path, &error));
    WELL(plimsoll_plan_load(path, &other, &error));
    HOLDS(plimsoll_plan_bytes(other) == plimsoll_plan_bytes(plan));
    plimsoll_session *session = NULL;
    WELL(plimsoll_session_open_plan(path, "graphs/mlp.onnxtxt", NULL, &session, &error));
    plimsoll_session_close(session);
    FAILS(PLIMSOLL_USAGE, "content", plimsoll_session_open_plan(path, "graphs/product.onnxtxt", NULL, &session, &error));
    remove(path);
    plimsoll_plan_close(other);
    plimsoll_plan_close(plan);
    plimsoll_model_close(model);

    WELL(plimsoll_model_open("graphs/mlp.onnxtxt", "{\"device\": \"cpu\", \"memory_limit\": 1000}", &model, &error));
    int code = plimsoll_model_plan(model, "cpu", &plan, &error);
    HOLDS(code == PLIMSOLL_FIT && plimsoll_error_exit_code(error) == 2 && strstr(plimsoll_error_fields(error), "\"limit\":1000"));
    found(__LINE__, code, PLIMSOLL_FIT, "does not fit");
    plimsoll_model_close(model);
    WELL(plimsoll_model_open("graphs/mlp.onnxtxt", "{\"memory_limit\": \"1MiB\"}", &model, &error));
    WELL(plimsoll_model_max_batch(model, NULL, NULL, &text, &error));
    has(text, "\"extent\"");
    WELL(plimsoll_model_fit(model, "cuda", 1, 1, NULL, &text, &error));
    has(text, "\"fewest\"");
    FAILS(PLIMSOLL_USAGE, "expected links", plimsoll_model_fit(model, "cuda", 1, 1, "fast", &text, &error));
    plimsoll_model_close(model);

    WELL(plimsoll_place("id,lower,upper,size\na,0,2,4\nb,1,3,4\nc,2,4,4\n", 1, 0, &text, &error));
    has(text, "\"peak\":8");
    FAILS(PLIMSOLL_SYNTAX, "unknown column", plimsoll_place("id,size,colour\n", 1, 0, &text, &error));
}

static void runs(void) {
    plimsoll_model *model = NULL;
    plimsoll_session *session = NULL, *other = NULL;
    WELL(plimsoll_model_open("graphs/product.onnxtxt", "{\"device\": \"cpu\", \"threads\": 1, \"dims\": {\"n\": 2}, \"forks\": 2}", &model, &error));
    WELL(plimsoll_session_open(model, &session, &error));
    WELL(plimsoll_session_fork(session, &other, &error));
    plimsoll_session *third = NULL;
    FAILS(PLIMSOLL_USAGE, "runs at once are taken", plimsoll_session_fork(session, &third, &error));
    plimsoll_session_close(other);
    HOLDS(plimsoll_session_inputs(session) == 2 && plimsoll_session_outputs(session) == 1 && plimsoll_session_states(session) == 0);
    plimsoll_port port;
    WELL(plimsoll_session_input(session, 1, &port, &error));
    HOLDS(strcmp(port.name, "b") == 0 && strcmp(port.dtype, "f32") == 0 && port.rank == 2 && port.shape[0] == 2 && port.bytes == 16);
    FAILS(PLIMSOLL_USAGE, "input 2: expected a number below 2", plimsoll_session_input(session, 2, &port, &error));
    WELL(plimsoll_session_output(session, 0, &port, &error));

    float a[4] = {1, 2, 3, 4}, b[4] = {1, 0, 0, 1}, y[4] = {0};
    plimsoll_input in[3] = {{NULL, a, 16, PLIMSOLL_HOST}, {"b", b, 16, PLIMSOLL_HOST}, {NULL, a, 16, PLIMSOLL_HOST}};
    plimsoll_output out[2] = {{"y", y, 16, PLIMSOLL_HOST}, {"y", y, 16, PLIMSOLL_HOST}};
    WELL(plimsoll_session_run(session, in, 2, out, 1, &error));
    HOLDS(memcmp(a, y, 16) == 0);
    FAILS(PLIMSOLL_USAGE, "expected a session", plimsoll_session_run(NULL, in, 2, out, 1, &error));
    FAILS(PLIMSOLL_USAGE, "found NULL for 2", plimsoll_session_run(session, NULL, 2, out, 1, &error));
    FAILS(PLIMSOLL_USAGE, "input 2 has no name", plimsoll_session_run(session, in, 3, out, 1, &error));
    FAILS(PLIMSOLL_USAGE, "input 'b' has no place", plimsoll_session_run(session, in, 1, out, 1, &error));
    FAILS(PLIMSOLL_USAGE, "output 'y' has no place", plimsoll_session_run(session, in, 2, NULL, 0, &error));
    FAILS(PLIMSOLL_USAGE, "output 'y': its place overlaps that of 'y'", plimsoll_session_run(session, in, 2, out, 2, &error));
    out[0].data = a + 2;
    out[0].bytes = 8;
    FAILS(PLIMSOLL_USAGE, "output 'y': its place overlaps that of 'a'", plimsoll_session_run(session, in, 2, out, 1, &error));
    out[0].data = y;
    FAILS(PLIMSOLL_USAGE, "expected a place of 16 bytes, found 8", plimsoll_session_run(session, in, 2, out, 1, &error));
    out[0].data = NULL;
    FAILS(PLIMSOLL_USAGE, "found NULL for 8", plimsoll_session_run(session, in, 2, out, 1, &error));
    out[0] = out[1];
    in[0].name = "b";
    FAILS(PLIMSOLL_USAGE, "input 'b' is given twice", plimsoll_session_run(session, in, 2, out, 1, &error));
    in[0].name = "c";
    FAILS(PLIMSOLL_USAGE, "input 'c': not an input of the graph", plimsoll_session_run(session, in, 2, out, 1, &error));
    in[0].name = "\xff";
    FAILS(PLIMSOLL_USAGE, "expected UTF-8", plimsoll_session_run(session, in, 2, out, 1, &error));
    in[0].name = NULL;
    in[0].place = 7;
    FAILS(PLIMSOLL_USAGE, "found the place 7", plimsoll_session_run(session, in, 2, out, 1, &error));
    in[0].place = PLIMSOLL_CUDA;
    FAILS(PLIMSOLL_USAGE, "CUDA memory is no memory of", plimsoll_session_run(session, in, 2, out, 1, &error));
    in[0].place = PLIMSOLL_HOST;
    WELL(plimsoll_session_run(session, in, 2, out, 1, &error));

    double times[3] = {-1, -1, -1};
    WELL(plimsoll_session_bench(session, 3, times, &error));
    HOLDS(times[0] >= 0 && times[2] >= 0);
    plimsoll_tensor *tensor = NULL;
    FAILS(PLIMSOLL_USAGE, "it has none", plimsoll_session_get_state(session, "s", &tensor, &error));
    plimsoll_session_close(session);
    plimsoll_model_close(model);

    /* Memory of the caller, which begins anywhere. */
    plimsoll_plan *plan = NULL;
    WELL(plimsoll_model_open("graphs/product.onnxtxt", "{\"device\": \"cpu\", \"threads\": 2, \"dims\": {\"n\": 64}}", &model, &error));
    WELL(plimsoll_model_plan(model, NULL, &plan, &error));
    size_t bytes = (size_t)plimsoll_plan_lent_bytes(plan);
    for (size_t shift = 0; shift < 300; shift += 37) {
        char *memory = malloc(bytes + shift);
        HOLDS(memory != NULL);
        WELL(plimsoll_session_open_in(model, memory + shift, bytes, &session, &error));
        FAILS(PLIMSOLL_BACKEND, "lent", plimsoll_session_open_in(model, memory + shift, bytes, &other, &error));
        plimsoll_usage usage;
        WELL(plimsoll_session_usage(session, &usage, &error));
        HOLDS(usage.bytes == plimsoll_plan_bytes(plan));
        plimsoll_session_close(session);
        FAILS(PLIMSOLL_FIT, "needs", plimsoll_session_open_in(model, memory + shift, bytes - 768, &session, &error));
        free(memory);
    }
    FAILS(PLIMSOLL_USAGE, "the memory", plimsoll_session_open_in(model, NULL, bytes, &session, &error));
    plimsoll_plan_close(plan);
    plimsoll_model_close(model);

    /* Shapes select the extent of a dim that has a range. */
    WELL(plimsoll_model_open("graphs/product.onnxtxt", "{\"device\": \"cpu\", \"threads\": 1, \"dims\": {\"n\": \"1..4\"}}", &model, &error));
    WELL(plimsoll_session_open(model, &session, &error));
    FAILS(PLIMSOLL_USAGE, "range", plimsoll_session_run(session, in, 2, out, 1, &error));
    uint64_t shape[2] = {2, 2};
    plimsoll_tensor *result = NULL;
    FAILS(PLIMSOLL_USAGE, "takes 16 bytes, found 8", plimsoll_tensor_open("f32", shape, 2, a, 8, &tensor, &error));
    FAILS(PLIMSOLL_USAGE, "found 'float'", plimsoll_tensor_open("float", shape, 2, a, 16, &tensor, &error));
    WELL(plimsoll_tensor_open("f32", shape, 2, a, 16, &tensor, &error));
    plimsoll_named named[2] = {{"a", tensor}, {"b", NULL}};
    FAILS(PLIMSOLL_USAGE, "'b': expected a tensor, found NULL", plimsoll_session_run_tensors(session, named, 2, &result, 1, &error));
    named[1].tensor = tensor;
    FAILS(PLIMSOLL_USAGE, "expected places for 1 outputs", plimsoll_session_run_tensors(session, named, 2, &result, 2, &error));
    WELL(plimsoll_session_run_tensors(session, named, 2, &result, 1, &error));
    WELL(plimsoll_tensor_port(result, &port, &error));
    memcpy(y, plimsoll_tensor_data(result), 16);
    HOLDS(port.rank == 2 && port.shape[0] == 2 && y[0] == 7 && y[3] == 22);
    plimsoll_tensor_close(result);
    plimsoll_tensor_close(tensor);
    plimsoll_session_close(session);
    plimsoll_model_close(model);
}

static void training(void) {
    plimsoll_model *model = NULL;
    plimsoll_trainer *trainer = NULL;
    plimsoll_tensor *x = NULL, *labels = NULL;
    plimsoll_plan *plan = NULL;
    char *text = NULL;
    const char *method = "{\"loss\": \"mse\", \"lr\": 0.01}";
    FAILS(PLIMSOLL_FILE, "nowhere.npy", plimsoll_tensor_load("nowhere.npy", &x, &error));
    WELL(plimsoll_tensor_load("graphs/linear-x.npy", &x, &error));
    WELL(plimsoll_tensor_load("graphs/linear-y.npy", &labels, &error));
    plimsoll_named inputs[1] = {{"x", x}};
    WELL(plimsoll_model_open("graphs/linear.onnxtxt", "{\"device\": \"cpu\", \"threads\": 1}", &model, &error));
    WELL(plimsoll_model_plan_training(model, "cpu", 16, method, &plan, &error));
    plimsoll_plan_close(plan);
    WELL(plimsoll_model_advise_training(model, NULL, 16, method, &text, &error));
    plimsoll_text_free(text);
    FAILS(PLIMSOLL_USAGE, "a memory limit", plimsoll_model_max_batch_of_training(model, NULL, method, &text, &error));
    FAILS(PLIMSOLL_USAGE, "labels", plimsoll_trainer_open(model, inputs, 1, NULL, 16, method, 10, NULL, &trainer, &error));
    FAILS(PLIMSOLL_USAGE, "option loss", plimsoll_trainer_open(model, inputs, 1, labels, 16, "", 10, NULL, &trainer, &error));
    uint64_t seed = 7;
    WELL(plimsoll_trainer_open(model, inputs, 1, labels, 16, method, 10, &seed, &trainer, &error));
    plimsoll_score before, after;
    plimsoll_step step;
    WELL(plimsoll_trainer_evaluate(trainer, inputs, 1, labels, &before, &error));
    plimsoll_tensor_close(x);
    plimsoll_tensor_close(labels);
    HOLDS(plimsoll_trainer_steps_per_epoch(trainer) > 0);
    for (uint64_t number = 0; number < 10; number++) WELL(plimsoll_trainer_step(trainer, number, &step, &error));
    WELL(plimsoll_trainer_evaluate(trainer, NULL, 0, NULL, &after, &error));
    HOLDS(after.loss < before.loss && after.accuracy < 0 && step.norm > 0);
    WELL(plimsoll_trainer_plan(trainer, &plan, &error));
    HOLDS(plimsoll_plan_bytes(plan) > 0);
    plimsoll_plan_close(plan);
    FAILS(PLIMSOLL_USAGE, "the path", plimsoll_trainer_save(trainer, NULL, &error));
    HOLDS(plimsoll_trainer_save(trainer, "/nowhere/model.onnx", &error) == PLIMSOLL_FILE);
    plimsoll_error_free(error);
    error = NULL;
    plimsoll_trainer_close(trainer);
    plimsoll_model_close(model);
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    plan_file = arguments[1];
    models();
    runs();
    training();
    plimsoll_model_close(NULL);
    plimsoll_plan_close(NULL);
    plimsoll_session_close(NULL);
    plimsoll_tensor_close(NULL);
    plimsoll_trainer_close(NULL);
    plimsoll_error_free(NULL);
    plimsoll_text_free(NULL);
    printf("plimsoll %s: all well\n", plimsoll_version());
    return 0;
}
