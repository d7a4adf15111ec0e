/* A whole simulation: loads from a source, any number of policies side by side, one run record
 * each. Every layer call is read once and handed to every policy. */
#ifndef MIZAN_SIM_STEP_RUN_H
#define MIZAN_SIM_STEP_RUN_H

#include "common/base/app.h"
#include "common/io/result.h"
#include "sim/step/sizing.h"
#include "sim/step/step.h"

typedef struct mz_sim mz_sim;

/* policies: texts like "lrmoe[keep=0.5]"; borrowed model, cluster. */
mz_code mz_sim_create(const mz_model *model, const mz_cluster *cluster,
                      const mz_step_options *options, char **policies, int count, mz_sim **sim,
                      mz_err *err);
void mz_sim_free(mz_sim **sim);
/* Before the run: beside every call's imbalance the least that its plan's own hosts allow, and a
 * lower bound over all placements with the policy's slots (policy.h). */
mz_code mz_sim_want_bounds(mz_sim *sim, mz_err *err);
bool mz_sim_wants_weights(const mz_sim *sim); /* some policy reads gate weights */
bool mz_sim_wants_pairs(const mz_sim *sim);   /* ... or dispatch needs the pairs */
/* Once. steps_expected: no more than so many steps come (it bounds the memory of the past); 0: not
 * known. */
mz_code mz_sim_run(mz_sim *sim, const mz_load_source *source, mz_app *app, int64_t steps_expected,
                   mz_err *err);
/* The step builder of policy i; lives as long as the sim. */
const mz_step *mz_sim_step(const mz_sim *sim, int policy);
/* Rows of all calls so far, of every policy: in scope layers, with a profile that was measured. */
const mz_rows_met *mz_sim_rows_met(const mz_sim *sim);
/* Replicas and token buffers of its ranks: the most of each in every step, sized three ways. */
void mz_sim_sizing(const mz_sim *sim, int policy, mz_sized *replicas, mz_sized *token_buffers);
/* Fills one record per policy, in the order given; arrays live as long as the sim. */
mz_code mz_sim_results(mz_sim *sim, mz_run *runs, mz_err *err);

#endif
