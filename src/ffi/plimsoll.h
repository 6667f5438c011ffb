/* plimsoll for C and C++: plans the memory of an ONNX model, and runs the model in exactly the bytes that were planned.
 *
 * What can fail returns a code, PLIMSOLL_OK or one of those below, and takes a `plimsoll_error **`, which may be NULL. It is set to NULL where
 * all is well, and otherwise to an error for plimsoll_error_free; what it held before is overwritten. A result is then NULL, too.
 *
 * Options are JSON, with the names of the command's flags: {"device": "cpu", "batch": 8, "memory_limit": "64MiB"}. NULL and "" are no options.
 * Texts are UTF-8 and end in a zero byte. A `const char *` that is returned belongs to the handle that it came from, and is there until that is
 * closed. A `char *` is the caller's, for plimsoll_text_free. All sizes are in bytes.
 *
 * Any thread may use any handle, and several at once may use the same one: sessions and trainers do one thing at a time. A handle is closed
 * once, when no thread uses it; NULL is closed without a word. Handles do not need each other: a model may be closed before its sessions.
 * A pointer that is NULL where it must not be is an error. One that points to fewer bytes than were said is the caller's fault.
 *
 * This file is written by a test from the Rust source: BLESS=1 cargo test --test it ffi:: */

#ifndef PLIMSOLL_H
#define PLIMSOLL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What went wrong. */
typedef struct plimsoll_error plimsoll_error;
/* A model's file as options shape it, before it runs. */
typedef struct plimsoll_model plimsoll_model;
/* A plan: what lies where, and when. */
typedef struct plimsoll_plan plimsoll_plan;
/* An array of elements, row-major, in the machine's order of bytes. */
typedef struct plimsoll_tensor plimsoll_tensor;
typedef struct plimsoll_named plimsoll_named;
typedef struct plimsoll_port plimsoll_port;
typedef struct plimsoll_input plimsoll_input;
typedef struct plimsoll_output plimsoll_output;
typedef struct plimsoll_usage plimsoll_usage;
/* A plan that is loaded, and runs. */
typedef struct plimsoll_session plimsoll_session;
/* A model in training. */
typedef struct plimsoll_trainer plimsoll_trainer;
typedef struct plimsoll_step plimsoll_step;
typedef struct plimsoll_score plimsoll_score;

/* ---- The library ---- */

/* The version of this interface. It changes when a program that was compiled with another one might not work. */
#define PLIMSOLL_ABI_VERSION 1

/* All is well. */
#define PLIMSOLL_OK 0

/* A file cannot be read or written, or has other content than expected. */
#define PLIMSOLL_FILE 1

/* A text does not follow its syntax. Fields: line, column. */
#define PLIMSOLL_SYNTAX 2

/* A node of a graph breaks a rule of its operator. Fields: node, op. */
#define PLIMSOLL_NODE 3

/* A graph as a whole is malformed. */
#define PLIMSOLL_GRAPH 4

/* Named dims of a graph have no extent. Field: dims. */
#define PLIMSOLL_UNBOUND 5

/* An input or an option does not suit the graph or the device, or an argument is none. */
#define PLIMSOLL_USAGE 6

/* More bytes are needed than the limit allows or the device has. Fields: needed, limit. */
#define PLIMSOLL_FIT 7

/* The host does not have enough memory. Field: needed. */
#define PLIMSOLL_MEMORY 8

/* A plan breaks a rule that every plan must keep. */
#define PLIMSOLL_PLAN 9

/* Two results that should agree differ. */
#define PLIMSOLL_DIFFER 10

/* A device is absent, is lost, or refused a request. Field: backend. */
#define PLIMSOLL_BACKEND 11

/* plimsoll has a bug: the text says where. */
#define PLIMSOLL_BUG 12

/* The version of the library, such as 0.1.0. It lasts as long as the program. */
const char *plimsoll_version(void);

/* The version of the interface that the library has. */
uint32_t plimsoll_abi_version(void);

/* Refuses a program that was compiled for another version of the interface: plimsoll_init(PLIMSOLL_ABI_VERSION, &error). Nothing else needs it. */
int plimsoll_init(uint32_t abi_version, plimsoll_error **error);

/* Frees a text that is the caller's. */
void plimsoll_text_free(char *text);

/* ---- Errors ---- */

/* The code that the function returned; PLIMSOLL_OK of NULL. */
int plimsoll_error_code(const plimsoll_error *error);

/* The exit code of a program that ends with it, as the command's: 1 bad input or usage, 2 does not fit, 3 results differ, 4 no such device. */
int plimsoll_error_exit_code(const plimsoll_error *error);

/* What went wrong, where, and what was expected: the words of the command. */
const char *plimsoll_error_text(const plimsoll_error *error);

/* Its facts as an object of JSON: those that the code names, and path, the file that it is about, or null. */
const char *plimsoll_error_fields(const plimsoll_error *error);

/* Frees an error. */
void plimsoll_error_free(plimsoll_error *error);

/* ---- Models ---- */

/* Reads a model's file, .onnx or .onnxtxt. Weights stay in the file until a session is opened. */
int plimsoll_model_open(const char *path, const char *options, plimsoll_model **model, plimsoll_error **error);

/* Reads the bytes of a model's file, which are copied. Data that it refers to lie in the current folder. */
int plimsoll_model_open_bytes(const uint8_t *data, size_t bytes, const char *options, plimsoll_model **model, plimsoll_error **error);

/* Closes a model. */
void plimsoll_model_close(plimsoll_model *model);

/* The graph's name. */
const char *plimsoll_model_name(const plimsoll_model *model);

/* The named dims, with the extents that they are planned for, and those that no option binds, which are 1:
 * {"dims": {"batch": "8"}, "assumed": []}. */
int plimsoll_model_dims(const plimsoll_model *model, char **json, plimsoll_error **error);

/* Plans the model for a target, with no device and no weights: cpu, cuda, wgpu, wgpu-desktop, or a file as `plimsoll devices` writes it. If
 * the target is NULL, it opens the device of the options and plans as plimsoll_session_open does. PLIMSOLL_FIT when it does not fit the
 * options' limit. */
int plimsoll_model_plan(const plimsoll_model *model, const char *target, plimsoll_plan **plan, plimsoll_error **error);

/* What is live at the peak of a plan for a target (NULL: cpu), and what would make it smaller by how much, as JSON. */
int plimsoll_model_advise(const plimsoll_model *model, const char *target, char **json, plimsoll_error **error);

/* The largest extent of a dim with which the plan for a target (NULL: cpu) fits the options' memory_limit, as JSON: dim, fits, next, plans.
 * If the dim is NULL, it is the one that no option binds, or the one that leads the inputs. */
int plimsoll_model_max_batch(const plimsoll_model *model, const char *target, const char *dim, char **json, plimsoll_error **error);

/* The fewest cards of the options' memory_limit on which it fits, from `least` to `most` of them, and the best meshes, as JSON. The links
 * between cards are {"gb_per_second": 50, "latency_us": 20}; NULL: those of NVLink. */
int plimsoll_model_fit(const plimsoll_model *model, const char *target, size_t least, size_t most, const char *links, char **json, plimsoll_error **error);

/* Runs the model as others do, buffer by buffer with and without a pool, and as it is planned, on the options' device. Inputs that are not
 * given are random. So many runs are timed. The bytes, times and differences of each way are JSON. */
int plimsoll_model_compare(const plimsoll_model *model, const plimsoll_named *inputs, size_t count, size_t runs, char **json, plimsoll_error **error);

/* Plans the training of a model on batches of so many rows, by a method: see plimsoll_trainer_open. */
int plimsoll_model_plan_training(const plimsoll_model *model, const char *target, size_t batch, const char *method, plimsoll_plan **plan, plimsoll_error **error);

/* What would make a training smaller, as plimsoll_model_advise tells of a run. */
int plimsoll_model_advise_training(const plimsoll_model *model, const char *target, size_t batch, const char *method, char **json, plimsoll_error **error);

/* The largest batch with which a training fits the options' memory_limit, as JSON: dim, fits, next, plans. */
int plimsoll_model_max_batch_of_training(const plimsoll_model *model, const char *target, const char *method, char **json, plimsoll_error **error);

/* ---- Plans ---- */

/* Reads a plan's file, and checks it. */
int plimsoll_plan_load(const char *path, plimsoll_plan **plan, plimsoll_error **error);

/* Reads a plan's text, and checks it. */
int plimsoll_plan_parse(const char *json, plimsoll_plan **plan, plimsoll_error **error);

/* Writes a plan's file. A reader sees the old one or the complete new one. */
int plimsoll_plan_save(const plimsoll_plan *plan, const char *path, plimsoll_error **error);

/* Closes a plan. */
void plimsoll_plan_close(plimsoll_plan *plan);

/* The bytes that it takes, all runs at once together; 0 of NULL. */
uint64_t plimsoll_plan_bytes(const plimsoll_plan *plan);

/* The bytes that plimsoll_session_open_in needs of memory that begins anywhere; 0 of NULL. Tables and stacks, which the processor's kernels
 * and the system take, are counted by plimsoll_plan_bytes and lie elsewhere. */
uint64_t plimsoll_plan_lent_bytes(const plimsoll_plan *plan);

/* Its bytes by class and at the peak, as JSON: bytes, lent_bytes, run_bytes, runs, classes, peak. */
int plimsoll_plan_memory(const plimsoll_plan *plan, char **json, plimsoll_error **error);

/* The plan as its file has it. */
int plimsoll_plan_json(const plimsoll_plan *plan, char **json, plimsoll_error **error);

/* The plan in words, as the command prints it. */
int plimsoll_plan_table(const plimsoll_plan *plan, char **table, plimsoll_error **error);

/* Checks that a plan breaks no rule, from the plan alone: PLIMSOLL_PLAN names the rule. */
int plimsoll_plan_check(const plimsoll_plan *plan, plimsoll_error **error);

/* What grew, what moved, and where the peak is now, of the first program of each plan, as JSON. */
int plimsoll_plan_diff(const plimsoll_plan *before, const plimsoll_plan *after, char **json, plimsoll_error **error);

/* Places buffers whose live ranges are given, as CSV with the columns id, lower, upper, size and perhaps alignment. Offsets are multiples of
 * `align`, a power of two. It ends after so many steps of one or two nanoseconds; 0: 2 000 000 000. The result is JSON: peak, lower_bound,
 * optimal, and csv, the table with a column of offsets. */
int plimsoll_place(const char *csv, uint64_t align, uint64_t steps, char **json, plimsoll_error **error);

/* ---- Tensors ---- */

/* A tensor with the name of an input or an output. */
struct plimsoll_named {
    /* The name. */
    const char *name;
    /* The tensor. */
    const plimsoll_tensor *tensor;
};

/* The name, the type and the extents of an input, an output, a state or a tensor. */
struct plimsoll_port {
    /* The name; of a tensor, an empty one. */
    const char *name;
    /* The type of the elements: f32, f16, bf16, f64, i64, i32, i16, i8, u64, u32, u16, u8, bool, or one of less than 8 bits. */
    const char *dtype;
    /* The extents of the axes. Of a dim that has a range, the largest. */
    const uint64_t *shape;
    /* The number of axes. */
    size_t rank;
    /* The bytes of all elements. */
    uint64_t bytes;
};

/* Makes a tensor of so many bytes, which are copied: elements of a type, in an order of axes with these extents. */
int plimsoll_tensor_open(const char *dtype, const uint64_t *shape, size_t rank, const void *data, size_t bytes, plimsoll_tensor **tensor, plimsoll_error **error);

/* Reads an array of NumPy, .npy. It stays mapped, not read, until its elements are used. */
int plimsoll_tensor_load(const char *path, plimsoll_tensor **tensor, plimsoll_error **error);

/* The type and the extents of a tensor. They belong to it. */
int plimsoll_tensor_port(const plimsoll_tensor *tensor, plimsoll_port *port, plimsoll_error **error);

/* The elements of a tensor, which belong to it. They may lie at any address. */
const void *plimsoll_tensor_data(const plimsoll_tensor *tensor);

/* Closes a tensor. */
void plimsoll_tensor_close(plimsoll_tensor *tensor);

/* ---- Sessions ---- */

/* Memory of the host. */
#define PLIMSOLL_HOST 0

/* Memory of the CUDA device that runs. A run waits for what the default stream holds when it begins. */
#define PLIMSOLL_CUDA 1

/* Memory of the caller that holds an input: its elements, row-major, in the type of the port. */
struct plimsoll_input {
    /* The name of the input. NULL: its number in the list is that of the session. */
    const char *name;
    /* The first byte. */
    const void *data;
    /* The number of bytes, that of the port. */
    size_t bytes;
    /* Where it is: PLIMSOLL_HOST or PLIMSOLL_CUDA. */
    int place;
};

/* Memory of the caller that takes an output. It overlaps none of the others of the run. */
struct plimsoll_output {
    /* The name of the output. NULL: its number in the list is that of the session. */
    const char *name;
    /* The first byte. */
    void *data;
    /* The number of bytes, that of the port. */
    size_t bytes;
    /* Where it is: PLIMSOLL_HOST or PLIMSOLL_CUDA. */
    int place;
};

/* The memory that a session has taken from its device, for all runs at once. */
struct plimsoll_usage {
    /* Bytes of its segments: those that were planned. */
    uint64_t bytes;
    /* Bytes of the host's memory that the device reads. */
    uint64_t pinned;
    /* The number of allocations so far: runs make none. */
    uint64_t allocations;
    /* Bytes that the driver has taken beside; UINT64_MAX where nothing counts them. */
    uint64_t overhead;
};

/* Plans a model for the device of its options, and loads it there. */
int plimsoll_session_open(const plimsoll_model *model, plimsoll_session **session, plimsoll_error **error);

/* As plimsoll_session_open, on the CPU, in memory of the caller, who frees it after the session is closed and uses it for nothing else
 * before. It may begin anywhere, and hold anything. plimsoll_plan_lent_bytes of plimsoll_model_plan with a NULL target is what it needs:
 * PLIMSOLL_FIT if it has less. */
int plimsoll_session_open_in(const plimsoll_model *model, void *memory, size_t bytes, plimsoll_session **session, plimsoll_error **error);

/* Loads a plan from its file, with the weights of the model's file that it was made of: what was planned is what runs. */
int plimsoll_session_open_plan(const char *plan, const char *model, const char *options, plimsoll_session **session, plimsoll_error **error);

/* A session that runs at the same time as this one, on the same constants, with states of its own. The option forks says how many there may
 * be. The memory of a fork is there until it and all others are closed. */
int plimsoll_session_fork(const plimsoll_session *session, plimsoll_session **fork, plimsoll_error **error);

/* Closes a session. */
void plimsoll_session_close(plimsoll_session *session);

/* The device in one line, and why it was chosen. */
const char *plimsoll_session_device(const plimsoll_session *session);

/* The plan that it runs. */
int plimsoll_session_plan(const plimsoll_session *session, plimsoll_plan **plan, plimsoll_error **error);

/* The memory that it has taken. */
int plimsoll_session_usage(const plimsoll_session *session, plimsoll_usage *usage, plimsoll_error **error);

/* The number of its inputs; 0 of NULL. */
size_t plimsoll_session_inputs(const plimsoll_session *session);

/* The number of its outputs; 0 of NULL. */
size_t plimsoll_session_outputs(const plimsoll_session *session);

/* The number of its states; 0 of NULL. */
size_t plimsoll_session_states(const plimsoll_session *session);

/* An input by its number, from 0 on. What it points to belongs to the session. */
int plimsoll_session_input(const plimsoll_session *session, size_t number, plimsoll_port *port, plimsoll_error **error);

/* An output by its number, from 0 on. What it points to belongs to the session. */
int plimsoll_session_output(const plimsoll_session *session, size_t number, plimsoll_port *port, plimsoll_error **error);

/* A state by its number, from 0 on. What it points to belongs to the session. */
int plimsoll_session_state(const plimsoll_session *session, size_t number, plimsoll_port *port, plimsoll_error **error);

/* Runs once, from memory of the caller and to it: an array for each input and for each output. It returns when the outputs are there. On the
 * CPU it allocates nothing but for elements that the device stores in another type. PLIMSOLL_USAGE when an array is missing, unknown, given
 * twice, of another length than its port, or overlaps another, or when a dim has a range: then nothing runs. */
int plimsoll_session_run(const plimsoll_session *session, const plimsoll_input *inputs, size_t input_count, const plimsoll_output *outputs, size_t output_count, plimsoll_error **error);

/* Runs once on tensors, whose shapes select the extents of dims that have a range. `outputs` has a place for each output, in the session's
 * order; each gets a tensor for plimsoll_tensor_close, with as many elements as were found. */
int plimsoll_session_run_tensors(const plimsoll_session *session, const plimsoll_named *inputs, size_t input_count, plimsoll_tensor **outputs, size_t output_count, plimsoll_error **error);

/* Times so many runs on random inputs, after one that is not timed. `milliseconds` has a place for each. */
int plimsoll_session_bench(const plimsoll_session *session, size_t runs, double *milliseconds, plimsoll_error **error);

/* The elements of a state, after the last run. */
int plimsoll_session_get_state(const plimsoll_session *session, const char *name, plimsoll_tensor **tensor, plimsoll_error **error);

/* Gives a state elements, for the next run. If they do not suit it, it is as before. */
int plimsoll_session_set_state(const plimsoll_session *session, const char *name, const plimsoll_tensor *tensor, plimsoll_error **error);

/* Gives all states the elements that they began with. */
int plimsoll_session_reset_states(const plimsoll_session *session, plimsoll_error **error);

/* Writes all states to a safetensors file. A reader sees the old one or the complete new one. */
int plimsoll_session_save_states(const plimsoll_session *session, const char *path, plimsoll_error **error);

/* Gives all states the elements that a safetensors file has. If they do not suit, all are as before. */
int plimsoll_session_load_states(const plimsoll_session *session, const char *path, plimsoll_error **error);

/* ---- Training ---- */

/* The figures of a step. */
struct plimsoll_step {
    /* The mean loss over the batch, before the update. */
    float loss;
    /* The learning rate. */
    float rate;
    /* The norm of all gradients together. */
    float norm;
};

/* The figures of an evaluation. */
struct plimsoll_score {
    /* The mean loss. */
    double loss;
    /* The share of right answers, of classes; below 0 where there are no classes. */
    double accuracy;
};

/* Plans the training of a model, and loads it on the device of its options. The first axis of each input and of the labels is that of the
 * rows, of which an update takes `batch`. The method is JSON, with the names of the command's flags:
 * {"loss": "cross_entropy", "optimizer": "adam", "lr": 0.001, "clip_norm": 1}. The learning rate follows its schedule over so many steps. Rows
 * are taken in an order by the seed `shuffle`, or in their own where that is NULL. The tensors may be closed when it returns. */
int plimsoll_trainer_open(const plimsoll_model *model, const plimsoll_named *inputs, size_t count, const plimsoll_tensor *labels, size_t batch, const char *method, uint64_t steps, const uint64_t *shuffle, plimsoll_trainer **trainer, plimsoll_error **error);

/* Closes a trainer. */
void plimsoll_trainer_close(plimsoll_trainer *trainer);

/* The plan of a training. */
int plimsoll_trainer_plan(const plimsoll_trainer *trainer, plimsoll_plan **plan, plimsoll_error **error);

/* The number of steps in which all rows are taken once; 0 of NULL. */
uint64_t plimsoll_trainer_steps_per_epoch(const plimsoll_trainer *trainer);

/* Runs the step with this number, from 0 on. If its loss is not finite, no weight changes. */
int plimsoll_trainer_step(const plimsoll_trainer *trainer, uint64_t number, plimsoll_step *step, plimsoll_error **error);

/* The loss and the accuracy over all rows of other data; of the training's own, if `labels` is NULL and there are no inputs. */
int plimsoll_trainer_evaluate(const plimsoll_trainer *trainer, const plimsoll_named *inputs, size_t count, const plimsoll_tensor *labels, plimsoll_score *score, plimsoll_error **error);

/* Writes the trained model as an .onnx file. */
int plimsoll_trainer_save(const plimsoll_trainer *trainer, const char *path, plimsoll_error **error);
#ifdef __cplusplus
}
#endif

#endif
