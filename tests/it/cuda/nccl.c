// NCCL over the driver beside it, whose memory is the host's: ranks are threads that meet at boards. It stands for a real one where what is
// tested is how it is called: calls go on after they return, a capture keeps them, and ncclCommDestroy waits for graphs that have kept
// some. NCCL_VERSION is the version; a rank that waits LATE milliseconds for another goes on, but its stream does not end. LOG is a file
// to which a line is added for each communicator that goes; a rank takes TAKES bytes when it joins.
#include <stdarg.h>
#include <time.h>
#ifndef NCCL_VERSION
#define NCCL_VERSION 22809
#endif
#ifndef TAKES
#define TAKES (8 << 20)
#endif
#ifndef LATE
#define LATE 60000
#endif

enum { IN_PROGRESS = 7, ARGUMENT = 4, USAGE = 5, MOST = 8 };
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL };
typedef struct { char bytes[128]; } unique;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, least, most; char *net; int share, traffic; } config;
typedef struct board {
    char name[256];
    // How many belong to it, are here, have split it, and wait; how often all have met.
    int joined, splits, here;
    unsigned long met;
    struct exchange *brought[MOST];
    struct board *next;
} board;
typedef struct { board *at; int rank, ranks, splits, asked, graphs; volatile int held; } comm;
typedef struct exchange { comm *of; int kind, type, op; size_t count; const char *read; char *write; } exchange;

static pthread_mutex_t meeting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static board *boards;
static __thread int grouped;
static __thread exchange sent;
static __thread int sends, receives, wrong;

static void tell(const char *what) {
#ifdef LOG
    FILE *log = fopen(LOG, "a");
    fprintf(log, "%s\n", what);
    fclose(log);
#endif
}

static comm *make(const char *name, int rank, int ranks) {
    comm *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&meeting);
    board *at = boards;
    while (at && strcmp(at->name, name)) at = at->next;
    if (!at) {
        at = calloc(1, sizeof *at);
        strcpy(at->name, name);
        at->next = boards;
        boards = at;
    }
    at->joined++;
    pthread_mutex_unlock(&meeting);
    made->at = at, made->rank = rank, made->ranks = ranks;
    return made;
}

static int is_sound(config *with) {
    const char *multicast = getenv("NCCL_NVLS_ENABLE");
    return with->size == 48 && with->magic == 0xcafebeef && with->blocking == 0 && with->share == 1 && with->most == 4 && !with->net
        && multicast && !strcmp(multicast, "0") && getenv("NCCL_BUFFSIZE") && getenv("NCCL_LL128_BUFFSIZE");
}

int ncclGetVersion(int *version) { *version = NCCL_VERSION; return OK; }
const char *ncclGetErrorString(int code) { return code == ARGUMENT ? "invalid argument" : code == USAGE ? "invalid usage" : "unhandled"; }
const char *ncclGetLastError(void *of) { return "of the stub"; }
int ncclGetUniqueId(unique *id) {
    static _Atomic int count;
    snprintf(id->bytes, sizeof id->bytes, "%d", count++);
    return OK;
}
int ncclCommInitRankConfig(comm **to, int ranks, unique id, int rank, config *with) {
    NEEDS_CONTEXT;
    if (!is_sound(with) || rank >= ranks || ranks > MOST) return ARGUMENT;
    used += TAKES;
    *to = make(id.bytes, rank, ranks);
    return IN_PROGRESS;
}
// All ranks have split before the parts know how many they are.
int ncclCommSplit(comm *of, int color, int key, comm **to, config *with) {
    NEEDS_CONTEXT;
    if (!is_sound(with)) return ARGUMENT;
    char name[256];
    snprintf(name, sizeof name, "%s/%d/%d", of->at->name, of->splits++, color);
    *to = make(name, key, 0);
    pthread_mutex_lock(&meeting);
    of->at->splits++;
    pthread_mutex_unlock(&meeting);
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(comm *of, int *state) {
    pthread_mutex_lock(&meeting);
    int over = of->at->joined >= of->ranks && of->at->splits >= of->splits * of->ranks;
    pthread_mutex_unlock(&meeting);
    // Whoever asks once too few has not waited.
    *state = of->asked++ % 3 == 2 && over ? OK : IN_PROGRESS;
    if (*state == OK) of->asked = 2;
    return OK;
}
static int part(comm *of, const char *how) {
    of->held = 0;
    if (of->graphs) tell("a graph lives");
    while (*(volatile int *)&of->graphs) usleep(1000);
    tell(how);
    return OK;
}
int ncclCommAbort(comm *of) { return part(of, "aborted"); }
int ncclCommDestroy(comm *of) { return part(of, "destroyed"); }

#define JOIN(type) do { \
    type *sum = (type *)to + i, more = ((const type *)from)[i]; \
    *sum = first ? more : op == 0 ? *sum + more : op == 1 ? *sum * more : op == 2 ? (*sum > more ? *sum : more) : (*sum < more ? *sum : more); \
} while (0)
static void join(char *to, const char *from, size_t count, int type, int op, int first) {
    for (size_t i = 0; i < count; i++)
        switch (type) { case 2: JOIN(int); break; case 4: JOIN(long long); break; case 7: JOIN(float); break; case 8: JOIN(double); }
}

// What all bring is exchanged by the last who comes.
static void exchanged(board *at, int ranks) {
    char *results[MOST];
    exchange *own = at->brought[0];
    int wide = own->type == 4 || own->type == 8, size = own->type == 1 ? 1 : wide ? 8 : 4;
    size_t bytes = own->count * size, whole = own->kind == ALL_REDUCE ? bytes : bytes * ranks;
    for (int rank = 0; rank < ranks; rank++) {
        char *to = results[rank] = malloc(whole);
        for (int other = 0; other < ranks; other++) {
            const char *from = at->brought[other]->read;
            switch (own->kind) {
            case ALL_REDUCE: join(to, from, own->count, own->type, own->op, !other); break;
            case REDUCE_SCATTER: join(to, from + rank * bytes, own->count, own->type, own->op, !other); break;
            case ALL_GATHER: memcpy(to + other * bytes, from, bytes); break;
            case ALL_TO_ALL: memcpy(to + other * bytes, from + rank * bytes, bytes); break;
            }
        }
    }
    for (int rank = 0; rank < ranks; rank++) {
        memcpy(at->brought[rank]->write, results[rank], own->kind == REDUCE_SCATTER ? bytes : whole);
        free(results[rank]);
    }
}

static int run(void *what) {
    exchange *own = what;
    comm *of = own->of;
    board *at = of->at;
    int ranks = at->joined;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += LATE / 1000, end.tv_nsec += LATE % 1000 * 1000000;
    if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
    pthread_mutex_lock(&meeting);
    unsigned long met = at->met;
    at->brought[of->rank] = own;
    if (++at->here == ranks) {
        exchanged(at, ranks);
        at->here = 0, at->met++;
        pthread_cond_broadcast(&changed);
    }
    int late = 0;
    while (at->met == met && !late) late = pthread_cond_timedwait(&changed, &meeting, &end);
    if (late) at->here--, of->held = 1, unending = &of->held;
    pthread_mutex_unlock(&meeting);
    return OK;
}
static int hold(void *what) { return __sync_fetch_and_add(&((exchange *)what)->of->graphs, 1), OK; }
static int release(void *what) { return __sync_fetch_and_sub(&((exchange *)what)->of->graphs, 1), OK; }

// Now, or in a graph later.
static int put(exchange own, void *stream) {
    NEEDS_CONTEXT;
    if (!stream || !own.of) return ARGUMENT;
    own.of->asked = 0;
    if (!capturing) return run(&own) ? USAGE : IN_PROGRESS;
    if (captured.works == MOST_WORK) return USAGE;
    work *kept = &captured.list[captured.works++];
    kept->run = run, kept->hold = hold, kept->release = release;
    memcpy(kept->what, &own, sizeof own);
    return IN_PROGRESS;
}
int ncclAllReduce(const char *read, char *write, size_t count, int type, int op, comm *of, void *stream) {
    return put((exchange){ of, ALL_REDUCE, type, op, count, read, write }, stream);
}
int ncclReduceScatter(const char *read, char *write, size_t got, int type, int op, comm *of, void *stream) {
    return put((exchange){ of, REDUCE_SCATTER, type, op, got, read, write }, stream);
}
int ncclAllGather(const char *read, char *write, size_t given, int type, comm *of, void *stream) {
    return put((exchange){ of, ALL_GATHER, type, 0, given, read, write }, stream);
}
// A send and a receipt for each rank, in one group, are an exchange of all with all.
static __thread void *sent_in;
int ncclGroupStart(void) { if (grouped++) return USAGE; sends = receives = wrong = 0; return OK; }
int ncclSend(const char *read, size_t count, int type, int peer, comm *of, void *stream) {
    if (!grouped || peer != sends) return USAGE;
    if (!sends++) sent = (exchange){ of, ALL_TO_ALL, type, 0, count, read, 0 }, sent_in = stream;
    wrong |= of != sent.of || stream != sent_in || count != sent.count || type != 1 || read != sent.read + peer * count;
    return OK;
}
int ncclRecv(char *write, size_t count, int type, int peer, comm *of, void *stream) {
    if (!grouped || peer != receives) return USAGE;
    if (!receives++) sent.write = write;
    wrong |= count != sent.count || write != sent.write + peer * count;
    return OK;
}
int ncclGroupEnd(void) {
    if (!grouped--) return USAGE;
    return wrong || sends != receives || sends != sent.of->at->joined ? USAGE : put(sent, sent_in);
}
