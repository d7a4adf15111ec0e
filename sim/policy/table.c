/* The one table of policies. A new policy: its file, one extern line, one entry. */
#include "sim/policy/plugin_table.h"

#include <string.h>

extern const mz_policy mz_policy_static, mz_policy_capacity, mz_policy_symi, mz_policy_fastermoe,
    mz_policy_smartmoe, mz_policy_flexmoe, mz_policy_laer, mz_policy_ultraep, mz_policy_topoep,
    mz_policy_eplb, mz_policy_lplb, mz_policy_llep, mz_policy_finemoe, mz_policy_lrmoe,
    mz_policy_ideal;

const mz_policy *const mz_policies[] = {
    &mz_policy_static,   &mz_policy_capacity, &mz_policy_symi,  &mz_policy_fastermoe,
    &mz_policy_smartmoe, &mz_policy_flexmoe,  &mz_policy_laer,  &mz_policy_ultraep,
    &mz_policy_topoep,   &mz_policy_eplb,     &mz_policy_lplb,  &mz_policy_llep,
    &mz_policy_finemoe,  &mz_policy_lrmoe,    &mz_policy_ideal, NULL,
};

static mz_code unknown(const char *name, mz_err *err) {
    const char *names[sizeof mz_policies / sizeof *mz_policies] = {0};
    int count = 0;
    for (; mz_policies[count]; count++)
        names[count] = mz_policies[count]->name;
    const char *near = mz_nearest(name, names, count);
    if (near)
        return mz_fail(err, MZ_EINPUT, "unknown policy \"%s\"; did you mean \"%s\"?", name, near);
    char list[256] = "";
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        size_t length = strlen(names[i]);
        if (used + length + 3 > sizeof list)
            break;
        if (i > 0) {
            memcpy(list + used, ", ", 3);
            used += 2;
        }
        memcpy(list + used, names[i], length + 1);
        used += length;
    }
    return mz_fail(err, MZ_EINPUT, "unknown policy \"%s\"; known are %s", name, list);
}

mz_code mz_policy_parse(const char *text, mz_arena *arena, const mz_policy **policy, void **options,
                        mz_err *err) {
    char *name = mz_arena_strdup(arena, text);
    if (!name)
        return mz_fail_nomem(err, "the name of a policy");
    char *list = NULL;
    mz_code code = mz_opt_split_name(name, "policy", &list, err);
    if (code != MZ_OK)
        return code;
    if (mz_plugin_is_path(name))
        return mz_plugin_parse(name, list, arena, policy, options, err);
    const mz_policy *found = NULL;
    for (int i = 0; mz_policies[i] && !found; i++)
        if (strcmp(mz_policies[i]->name, name) == 0)
            found = mz_policies[i];
    if (!found)
        return unknown(name, err);
    void *parsed = mz_arena_alloc(arena, 1, found->options_size);
    char *owner = mz_arena_printf(arena, "policy %s", found->name);
    if (!parsed || !owner)
        return mz_fail_nomem(err, "the options of a policy");
    code = mz_opt_parse_list(found->options, found->option_count, owner, list, parsed, err);
    if (code != MZ_OK)
        return code;
    *policy = found;
    *options = parsed;
    return MZ_OK;
}
