/* Policies of your own: a shared object that `--policy ./mine.so[key=value,...]` loads.
 *
 * This header needs no other one and serves C (C99 and later) and C++. A plug-in exports one
 * variable, `mizan_plugin`:
 *
 *     #include <mizan/plugin.h>
 *     MZ_PLUGIN_EXPORT const mz_plugin mizan_plugin = {.abi = MZ_PLUGIN_ABI, .name = "mine",
 *                                                      .init = my_init, .decide = my_decide};
 *
 * sim/policy/example/hottest.c is a whole one; `cc -shared -fPIC hottest.c -o hottest.so` builds
 * it. Where it runs: in a process of its own, one for each expert-parallel group. A crash, an
 * exit, a call that lasts longer than [timeout=SECONDS] (60) or an invalid plan ends the command
 * with one line that names the plug-in, exit code 2. What it prints goes to standard error.
 *
 * Rules. Functions that can fail return NULL, or one line that says why not; the text need only
 * live until the next call. Ranks, experts and layers count from 0; matrices are row-major; loads
 * are pairs: one pair is one token's choice of one expert. Pointers that a call is given are valid
 * during that call (those of `env` as long as the plug-in lives). One thread calls. The same calls
 * must give the same plans: take random numbers from env->seed alone. */
#ifndef MIZAN_SIM_POLICY_PLUGIN_H
#define MIZAN_SIM_POLICY_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define MZ_PLUGIN_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define MZ_PLUGIN_EXPORT __attribute__((visibility("default")))
#endif

/* Raised whenever a struct below changes; Mizan loads its own version and no other. */
#define MZ_PLUGIN_ABI 1

/* What a plug-in is told once. One group of ranks that share the experts. */
typedef struct mz_plugin_env {
    int32_t ranks, experts, layers; /* of the group; MoE layers */
    int32_t top_k;                  /* experts per token, 0: varies */
    int32_t domains;                /* nodes, or islands of fast links */
    const int32_t *domain;          /* [ranks] */
    const int32_t *home;            /* [experts] rank that owns the expert: block layout */
    int32_t mains_per_rank;         /* most experts that have their home on one rank */
    int32_t expert_groups;          /* of the router (DeepSeek's n_group); 1: none */
    int64_t hidden, intermediate, expert_parameters;
    int64_t weight_bytes; /* of one expert in bf16 */
    int64_t state_bytes;  /* optimizer state of one expert */
    int64_t token_bytes;  /* one row on the wire */
    double pair_seconds;  /* forward products of one pair, where an expert has many */
    double inside_bytes_s, outside_bytes_s; /* one rank's rate inside and across domains */
    uint64_t seed;
} mz_plugin_env;

/* The text in brackets, in order: "depth=3,fast" is {"depth", "3"}, {"fast", ""}. */
typedef struct mz_plugin_option {
    const char *key, *value;
} mz_plugin_option;

enum { MZ_PLUGIN_SEES_CURRENT = 1, MZ_PLUGIN_SEES_HISTORY = 2 };

/* What becomes of copies, and so what moves and what memory they take. */
enum {
    /* Copies live for one layer call. The first host of an expert is its home. Weights travel to
     * every copy beside packing, and again in backward under the work of other layers; fp32
     * gradients travel back. Slots beyond the mains are shared by all layers. */
    MZ_PLUGIN_COPIES_CALL = 0,
    /* The placement lasts until the next decide, which runs once per step and layer. Whoever hosts
     * an expert anew fetches weights and optimizer state at the end of the step, and the step
     * waits; gradients of an expert with several hosts are all-reduced once per step. Slots lie in
     * the memory of every layer. */
    MZ_PLUGIN_COPIES_LAST = 1,
    /* Nothing moves but what decide states with plan->move. Memory as with CALL. */
    MZ_PLUGIN_COPIES_STATED = 2
};

/* What init answers; the fields come filled with the defaults in brackets. */
typedef struct mz_plugin_traits {
    unsigned sees;       /* what decide is shown [MZ_PLUGIN_SEES_CURRENT]; 0: nothing */
    int32_t lag, window; /* history: the mean of `window` steps ending `lag` steps ago [1, 1] */
    int32_t interval;    /* decide runs every so many steps; 1: in every layer call [1] */
    int32_t slots;       /* experts that a rank can hold, its own included [mains_per_rank + 2] */
    int32_t copies;      /* [MZ_PLUGIN_COPIES_CALL] */
    int32_t lossy;       /* 1: it may drop pairs or leave some out of backward [0] */
    double planner_seconds; /* what one decide costs a step on the machine simulated [0] */
} mz_plugin_traits;

typedef struct mz_plugin_load {
    int32_t sources, experts; /* sources: the ranks of the group, in order */
    const int64_t *count;     /* [sources][experts] pairs */
    const int64_t *total;     /* [experts] */
    int64_t pairs;            /* of all */
} mz_plugin_load;

typedef struct mz_plugin_view {
    int64_t step;
    int32_t micro_batch, layer;
    const mz_plugin_load *current; /* NULL unless it is to be seen */
    const mz_plugin_load *history; /* the same; NULL also before there is any */
} mz_plugin_view;

/* Values of the fields of a move. src and dst: a rank, or MZ_PLUGIN_EVERY_RANK (one of the two)
 * for what lies evenly over all ranks. */
enum { MZ_PLUGIN_WEIGHTS, MZ_PLUGIN_GRADIENTS, MZ_PLUGIN_OPTIMIZER };
enum {
    MZ_PLUGIN_FORWARD,    /* before this call's expert products in forward */
    MZ_PLUGIN_BACKWARD,   /* before those in backward */
    MZ_PLUGIN_REDUCE,     /* after those in backward */
    MZ_PLUGIN_STEP,       /* once per step, after the optimizer */
    MZ_PLUGIN_REDUCE_STEP /* once per step, after the last micro-batch's backward of this layer */
};
enum {
    MZ_PLUGIN_HIDE_NOTHING,  /* the rank waits */
    MZ_PLUGIN_HIDE_PACK,     /* runs beside packing, dispatch waits */
    MZ_PLUGIN_HIDE_DISPATCH, /* runs beside packing and dispatch, the products wait */
    MZ_PLUGIN_HIDE_LAYERS,   /* runs beside the work of other layers */
    MZ_PLUGIN_HIDE_FREE      /* costs nothing on the wire */
};
enum { MZ_PLUGIN_EVERY_RANK = -1 };
typedef struct mz_plugin_move {
    int32_t kind, phase, hide;
    int32_t expert, src, dst;
    int32_t round;  /* moves of equal round run together, rounds one after another */
    int32_t change; /* 1: of a change of placement, only in the step that decided it */
    int64_t bytes;
} mz_plugin_move;

/* decide's answer, given call by call. Every function is false when its arguments are out of range
 * or there is no room; that fails the plan in any case, so its result may be ignored. */
typedef struct mz_plugin_plan mz_plugin_plan;
struct mz_plugin_plan {
    void *inside; /* Mizan's */
    /* One more host of an expert, in order: the first is its main. pairs: what is meant for this
     * host; -1: an equal share. Every expert needs a host; a rank may host one twice. */
    bool (*host)(mz_plugin_plan *plan, int32_t expert, int32_t rank, int64_t pairs);
    /* Pairs of an expert that take part in backward, at most those of the call (lossy only). */
    bool (*quota)(mz_plugin_plan *plan, int32_t expert, int64_t pairs);
    bool (*move)(mz_plugin_plan *plan, const mz_plugin_move *move);
    /* Why this plan, for reports: one line, cut at 255 bytes. */
    void (*why)(mz_plugin_plan *plan, const char *text);
};

/* For plug-ins that say themselves which source sends where. */
typedef struct mz_plugin_call mz_plugin_call;
struct mz_plugin_call {
    void *inside;
    int64_t step;
    int32_t micro_batch, layer;
    const mz_plugin_load *load; /* of this call, exact */
    const int32_t *begin;       /* [experts + 1] hosts of expert e: rank[begin[e]] to
                                   rank[begin[e + 1] - 1] */
    const int32_t *rank;
    const int64_t *pairs; /* what decide meant for each host, or -1 */
    /* `pairs` pairs of (source, expert) are computed by that host (its place in `rank`); may be
     * called for one place several times, in any order. All together must be what the source has
     * for the expert, less what is dropped. */
    bool (*send)(mz_plugin_call *call, int32_t source, int32_t host, int64_t pairs);
    /* Pairs that nobody computes (lossy only). */
    bool (*drop)(mz_plugin_call *call, int32_t source, int32_t expert, int64_t pairs);
};

typedef struct mz_plugin {
    int32_t abi;      /* MZ_PLUGIN_ABI */
    const char *name; /* one word */
    /* *state comes NULL and goes to the other calls. */
    const char *(*init)(const mz_plugin_env *env, const mz_plugin_option *option, int32_t options,
                        mz_plugin_traits *traits, void **state);
    const char *(*decide)(void *state, const mz_plugin_view *view, mz_plugin_plan *plan);
    /* NULL: an expert's pairs are shared among its hosts in proportion to what decide meant for
     * them (largest remainder), those of the hosts' own ranks first, then of their domains. */
    const char *(*route)(void *state, mz_plugin_call *call);
    void (*release)(void *state); /* at a regular end; may be NULL */
} mz_plugin;

#endif
