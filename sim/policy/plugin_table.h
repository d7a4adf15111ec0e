/* What the table of policies asks plug-ins. Private to this room. */
#ifndef MIZAN_SIM_POLICY_PLUGIN_TABLE_H
#define MIZAN_SIM_POLICY_PLUGIN_TABLE_H

#include "sim/policy/policy.h"

/* A name with a slash, or that ends in .so, is the path of a plug-in. */
bool mz_plugin_is_path(const char *name);
/* path and text (the options in brackets) live in the arena and may be changed. A file that cannot
 * be read, a wrong timeout: MZ_EINPUT. It is loaded when the policy's init runs. */
mz_code mz_plugin_parse(char *path, char *text, mz_arena *arena, const mz_policy **policy,
                        void **options, mz_err *err);

#endif
