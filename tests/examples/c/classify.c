/* Classifies a picture of a handwritten digit, in memory that the program has already.
 * cc -std=c11 classify.c $(pkg-config --cflags --libs plimsoll) -lm */

#include <math.h>
#include <plimsoll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *PICTURE[8] = {"  i@@@@X", "  +cii#x", "     cX.", "   :+@: ", "  i@@@= ", "  ;x@;. ", "  .8o   ", "  :@,   "};
/* Ink, from none to the most. */
static const char *INK = " .,:;i+=xcoXO8%#@";

/* Ends the program if a function returned an error. */
static void check(int code, plimsoll_error **error) {
    if (code == PLIMSOLL_OK) return;
    fprintf(stderr, "%s\n", plimsoll_error_text(*error));
    int exit_code = plimsoll_error_exit_code(*error);
    plimsoll_error_free(*error);
    exit(exit_code);
}

int main(void) {
    plimsoll_error *error = NULL;
    check(plimsoll_init(PLIMSOLL_ABI_VERSION, &error), &error);

    plimsoll_model *model;
    check(plimsoll_model_open("graphs/digits.onnx", "{\"device\": \"cpu\", \"threads\": 2, \"batch\": 1}", &model, &error), &error);

    /* What it will take, before any of it is taken. */
    plimsoll_plan *plan;
    check(plimsoll_model_plan(model, NULL, &plan, &error), &error);
    size_t bytes = (size_t)plimsoll_plan_lent_bytes(plan);
    void *arena = malloc(bytes);
    if (arena == NULL) return 2;

    plimsoll_session *session;
    check(plimsoll_session_open_in(model, arena, bytes, &session, &error), &error);
    plimsoll_usage usage;
    check(plimsoll_session_usage(session, &usage, &error), &error);
    printf("%s: %llu bytes were planned, %llu are taken\n\n", plimsoll_session_device(session),
           (unsigned long long)plimsoll_plan_bytes(plan), (unsigned long long)usage.bytes);
    int is_as_planned = usage.bytes == plimsoll_plan_bytes(plan);
    plimsoll_plan_close(plan);
    plimsoll_model_close(model);

    float image[64], scores[10];
    for (int i = 0; i < 64; i++) image[i] = (float)(strchr(INK, PICTURE[i / 8][i % 8]) - INK) / 16.0f;
    plimsoll_input input = {"image", image, sizeof image, PLIMSOLL_HOST};
    plimsoll_output output = {"logits", scores, sizeof scores, PLIMSOLL_HOST};
    check(plimsoll_session_run(session, &input, 1, &output, 1, &error), &error);

    double sum = 0;
    int best = 0;
    for (int digit = 0; digit < 10; digit++) {
        sum += exp(scores[digit]);
        if (scores[digit] > scores[best]) best = digit;
    }
    for (int digit = 0; digit < 10; digit++)
        printf("%s   %d %5.1f %%\n", digit < 8 ? PICTURE[digit] : "        ", digit, 100 * exp(scores[digit]) / sum);
    printf("\nIt is a %d.\n", best);

    plimsoll_session_close(session);
    free(arena);
    return best == 7 && is_as_planned ? 0 : 3;
}
